"""Row-invariant functions of a mixture's block: its router multiplies by ``F.linear``, without a module.

Element-wise functions get whole vectors, as in ``WholeVectorActivation``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from specdec.engine.model.linear import PackedLinear, PackedWeight, WeightPacker, in_whole_vectors, is_activation

_ELEMENT_WISE = ("sigmoid", "silu", "gelu", "tanh", "exp", "expm1", "log", "log1p", "softplus", "erf", "mish")

_NAMES = frozenset({*_ELEMENT_WISE, "ACT2FN"})
_DONE = "_specdec_functions"

Function = Callable[..., Any]


class InvariantFunctions(TorchFunctionMode):
    """Replaces functions whose bits depend on the number of rows, while it is entered. Cost: 1 us per call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[int, PackedWeight] = {}
        self._kept: list[torch.Tensor] = []  # so that ids stay theirs
        self._handlers: dict[Function, Callable[..., torch.Tensor]] = {functional.linear: self._linear}
        for name in _ELEMENT_WISE:
            for owner in (torch, torch.Tensor, functional):
                if function := getattr(owner, name, None):
                    self._handlers[function] = _in_whole_vectors(function)

    def take(self, weight: torch.Tensor, packed: PackedWeight) -> None:
        """Multiply by ``packed``, which has no bias, where the weight is given to ``F.linear``."""
        self._packed[id(weight)] = packed
        self._kept.append(weight)

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch."""
        handler = self._handlers.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed = self._packed.get(id(weight))
        if packed is None:
            return functional.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        out = packed(rows).view(*input.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias


def make_functions_row_invariant(model: nn.Module) -> None:
    """Run each module whose code names element-wise functions with ``InvariantFunctions``; nothing at a second call.

    Activations that are modules are replaced in another way (``specdec.engine.model.linear``).
    """
    if hasattr(model, _DONE):
        return
    setattr(model, _DONE, True)
    functions, known = InvariantFunctions(), dict[str, bool]()
    covered: set[nn.Module] = set()
    for module in model.modules():  # parents come first
        kind = type(module)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in known:
            known[name] = _calls_element_wise(kind)
        if module in covered or is_activation(module) or not known[name]:
            continue
        covered.update(module.modules())
        _run_with(functions, module)


def _calls_element_wise(kind: type) -> bool:
    """Whether a class's code, or a function of its file that it calls, names an element-wise function."""
    file = inspect.getmodule(kind)
    open_codes = [
        inspect.unwrap(method).__code__
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
        for method in vars(base).values()
        if inspect.isfunction(method)
    ]
    seen: set[CodeType] = set()
    while open_codes:
        code = open_codes.pop()
        if code in seen:
            continue
        seen.add(code)
        if not _NAMES.isdisjoint(code.co_names):
            return True
        open_codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        called = (getattr(file, name, None) for name in code.co_names)
        open_codes += [inspect.unwrap(each).__code__ for each in called if inspect.isfunction(each)]
    return False


def make_block_row_invariant(block: nn.Module, pack: WeightPacker) -> None:
    """Run a block, whose linear layers are packed already, with ``InvariantFunctions``."""
    functions = InvariantFunctions()
    for module in block.modules():
        if isinstance(module, PackedLinear):
            if not module.has_bias:
                functions.take(module.weight, module.packed)
            continue
        if isinstance(module, nn.Embedding):
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() == 2 and weight.dtype == torch.float32:
                functions.take(weight, pack(weight.detach(), None))
    _run_with(functions, block)


def _run_with(functions: InvariantFunctions, module: nn.Module) -> None:
    forward = module.forward

    def invariant(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return forward(*args, **kwargs)

    module.forward = invariant


def _in_whole_vectors(function: Function) -> Callable[..., torch.Tensor]:
    def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return in_whole_vectors(lambda x: function(x, *args, **kwargs), input)

    return run
