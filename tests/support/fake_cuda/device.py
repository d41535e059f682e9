"""Tensors of the fake device, whose operations torch queues in a stream, and the device itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.support.fake_cuda.streams import Graph, Memory, Stream, spoil

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
META = torch.device("meta")
_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)
_WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default)


class DeviceTensor(torch.Tensor):
    """A tensor that reports a GPU as its device; a tensor on the CPU gets its values later."""

    backing: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, backing: torch.Tensor, memory: Memory) -> DeviceTensor:
        """A view of ``memory``, as ``backing`` is a view of the memory's store."""
        with torch.inference_mode(False):  # torch does not let Python code detach inference tensors
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                backing.shape,
                strides=backing.stride(),
                storage_offset=backing.storage_offset(),
                dtype=backing.dtype,
                device=CUDA,
            )
        made.backing, made.memory = backing, memory
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy a tensor to the CPU for functions that read its values."""
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            return func(args[0].cpu())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of its FakeDevice")


def unwrapped(value: Any) -> Any:
    """The backing of a device's tensor; any other value unchanged."""
    return value.backing if isinstance(value, DeviceTensor) else value


def _check_mode(written: Sequence[Any]) -> None:
    """Raise torch's error for a tensor of inference mode that is written outside of it."""
    if torch.is_inference_mode_enabled():
        return
    flat, _ = tree_flatten(written)
    if any(isinstance(each, DeviceTensor) and each.memory.is_of_inference for each in flat):
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed.")


def _without_numbers(func: Any, flat: list[Any], spec: Any) -> Any:
    """Results of an operation on the meta device."""
    metas = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in map(unwrapped, flat)]
    args, kwargs = tree_unflatten([META if isinstance(each, torch.device) else each for each in metas], spec)
    return func(*args, **kwargs)


class FakeDevice(TorchDispatchMode):
    """One GPU for one thread, with the tensors that are made on ``cuda:0`` within its context.

    Copies from the host read at the call, unless the memory is pinned. Copies to the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.default = Stream()
        self.num_to_host = self.num_to_device = 0
        """Copies to the host, and to the device."""
        self.num_waits = 0
        """Waits of the host for a stream."""
        self.refuses_waits = False
        """Whether a wait raises, as by torch.cuda.set_sync_debug_mode("error")."""
        self.num_allocated = self.num_held = 0
        """Bytes allocated in all, and bytes not freed."""
        self._pinned: set[int] = set()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Replaces torch.cuda.stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def put_launch(self, name: str, launch: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Queue the launch of a kernel that is not torch's, over the backings of its arguments."""
        self._note(name, arguments)
        backings = [unwrapped(each) for each in arguments]
        self.current.put(lambda: launch(*backings))

    def wait(self) -> None:
        """Let the host wait for the current stream."""
        if self.refuses_waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.num_waits += 1
        self.current.synchronize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Queue one operation in the current stream; an operation on the host's tensors runs at once."""
        kwargs = dict(kwargs or {})
        flat, spec = tree_flatten((args, kwargs))
        is_ours = any(isinstance(each, DeviceTensor) for each in flat)
        device = kwargs.get("device")
        to_cuda = device is not None and torch.device(device).type == "cuda"
        if kwargs.get("pin_memory") or func is aten._pin_memory.default:
            return self._pinned_one(func, args, kwargs)
        if not is_ours and not to_cuda:
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten._to_copy.default and (not is_ours or not (to_cuda or device is None)):
            return self._copied(args[0], kwargs, to_cuda=to_cuda)
        if func is aten.copy_.default and not all(isinstance(each, DeviceTensor) for each in args[:2]):
            return self._copied_into(args[0], args[1], bool(kwargs.get("non_blocking") or any(args[2:])))
        if to_cuda:
            kwargs["device"] = torch.device("cpu")
        if func in _EMPTY or func.overloadpacket in (aten.empty_like, aten.new_empty, aten.new_empty_strided):
            return self._allocated(func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs)))
        flat, spec = tree_flatten((args, kwargs))
        if func.is_view:
            memory = next(each.memory for each in flat if isinstance(each, DeviceTensor))
            made = func(*tree_map(unwrapped, args), **kwargs)
            return tree_map(lambda view: DeviceTensor(view, memory), made)
        if func in _WAITS:
            self.num_to_host += 1
            self.wait()
            found = func(*tree_map(unwrapped, args), **kwargs)
            return self._allocated(found, found) if isinstance(found, torch.Tensor) else found
        if func is aten.where.self and any(type(each) is torch.Tensor for each in flat):
            self.num_to_device += 1  # its number is copied to the device, and is no argument of the kernel
            self.wait()
        self._note(str(func), flat)
        return self._put(func, flat, spec)

    def _put(self, func: Any, flat: list[Any], spec: Any) -> Any:
        own_args, own_kwargs = tree_unflatten(flat, spec)
        args, kwargs = tree_unflatten([unwrapped(each) for each in flat], spec)
        named = dict(zip((each.name for each in func._schema.arguments), own_args, strict=False)) | own_kwargs
        written = [
            named[each.name]
            for each in func._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write and each.name in named
        ]
        if written:
            _check_mode(written)
            self.current.put(lambda: func(*args, **kwargs))
            if not func._schema.returns:
                return None  # of lists
            return written[0] if len(written) == 1 else tuple(written)
        given, given_spec = tree_flatten(_without_numbers(func, flat, spec))
        made = [self._allocated(torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)) for each in given]
        targets = [each.backing for each in made]

        def run() -> None:
            for target, result in zip(targets, tree_flatten(func(*args, **kwargs))[0], strict=True):
                target.copy_(result)

        self.current.put(run)
        return tree_unflatten(made, given_spec)

    def _allocated(self, backing: torch.Tensor, content: torch.Tensor | None = None) -> DeviceTensor:
        """A tensor in new memory, which has invalid content unless ``content`` is given."""
        backing = backing.clone() if content is not None else backing
        memory = Memory(backing.untyped_storage(), self.current, self.current.capturing, self._freed)
        if content is None:
            spoil(memory.store)
        self.num_allocated += memory.store.nbytes()
        self.num_held += memory.store.nbytes()
        if self.current.capturing is not None:
            self.current.capturing.owns(memory)
        return DeviceTensor(backing, memory)

    def _freed(self, num_bytes: int) -> None:
        self.num_held -= num_bytes

    def _copied(self, source: torch.Tensor, kwargs: dict[str, Any], *, to_cuda: bool) -> torch.Tensor:
        non_blocking = bool(kwargs.pop("non_blocking", False))
        if not to_cuda:
            self.num_to_host += 1
            self.wait()
            copied: torch.Tensor = aten._to_copy.default(unwrapped(source), **kwargs)
            return copied
        kwargs["device"] = torch.device("cpu")
        made = self._allocated(torch.empty_like(aten._to_copy.default(source, **kwargs)))
        self._copied_into(made, source, non_blocking)
        return made

    def _copied_into(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        _check_mode([target])
        host = source if isinstance(target, DeviceTensor) else target
        if source.dim() == 0 and host is source and isinstance(target, DeviceTensor) and target.dim() > 0:
            source = source.clone()  # passed as a kernel's argument
            self.current.put(lambda: target.backing.copy_(source))
            return target
        is_late = non_blocking and host.untyped_storage()._cdata in self._pinned
        if not is_late:
            self.current.refuse_while_capturing()
        if isinstance(target, DeviceTensor):
            self.num_to_device += 1
            taken, place = source if is_late else source.clone(), target.backing
            self.current.put(lambda: place.copy_(taken))
            if not non_blocking:
                self.wait()
            return target
        self.num_to_host += 1
        taken = unwrapped(source)
        self.current.put(lambda: target.copy_(taken))
        if not is_late:
            self.wait()
        return target

    def _pinned_one(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        made: torch.Tensor = args[0].clone() if func is aten._pin_memory.default else func(*args, **kwargs)
        self._pinned.add(made.untyped_storage()._cdata)
        return made

    def _note(self, name: str, values: Sequence[Any]) -> None:
        graph: Graph | None = self.current.capturing
        for each in values if graph is not None else ():
            if isinstance(each, DeviceTensor):
                graph.takes(each.memory, name)
            elif isinstance(each, torch.Tensor) and each.dim() > 0:
                self.current.refuse_while_capturing()
