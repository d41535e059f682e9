"""Device of Triton kernels in tests: a GPU, or the CPU with Triton's interpreter (see tests/conftest.py)."""

import functools
import math
import os
from typing import Any

import numpy as np
import torch
from triton.language import core as language
from triton.language.core import block_type, constexpr
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from specdec.engine.cuda.launch import Launch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def _patched_once(call: Any) -> Any:
    """``InterpretedFunction.__call__`` for functions inside kernels, without patching Triton's language at each call.

    A launch patches the names of its kernel's module. Another module stays patched after its first call.
    """
    patched: set[str] = set()

    @functools.wraps(call)
    def call_in_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module in patched:
            return self.rewrite()(*args, **kwargs)
        result = call(self, *args, **kwargs)
        patched.add(module)
        return result

    return call_in_kernel


def _by_name(numpy_type: Any) -> Any:
    """`numpy_type` with a cache by the name of Triton's type."""
    known: dict[str, np.dtype[Any]] = {}

    @functools.wraps(numpy_type)
    def look_up(kind: Any) -> np.dtype[Any]:
        if kind.name not in known:
            known[kind.name] = numpy_type(kind)
        return known[kind.name]

    return look_up


def _at_once_where_equal(broadcast: Any) -> Any:
    """``broadcast_impl_value`` that returns blocks of equal shapes at once."""

    @functools.wraps(broadcast)
    def broadcast_values(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        kinds = left.type, right.type
        if all(kind.is_block() for kind in kinds) and kinds[0].shape.values == kinds[1].shape.values:
            return left, right
        both: tuple[Any, Any] = broadcast(self, left, right)
        return both

    return broadcast_values


def _made_once(with_element_type: Any) -> Any:
    """``block_type.with_element_ty`` with a cache."""
    made: dict[tuple[str, str], Any] = {}

    @functools.wraps(with_element_type)
    def with_element(self: Any, element: Any) -> Any:
        names = self.name, element.name
        if names not in made:
            made[names] = with_element_type(self, element)
        return made[names]

    return with_element


def _make_tensor(self: Any, handle: Any, kind: Any) -> None:
    """``tensor.__init__`` that makes the shape of each kind of block once."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shape_of(tuple(kind.shape.values) if kind.is_block() else ())


@functools.cache
def _shape_of(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    return language.tuple([constexpr(length) for length in lengths]), constexpr(math.prod(lengths))


if DEVICE == "cpu":  # Otherwise these take half of the interpreter's time.
    language.tensor.__init__ = _make_tensor
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None  # computes what only `debug` looks at
    interpreter.InterpretedFunction.__call__ = _patched_once(interpreter.InterpretedFunction.__call__)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    TritonSemantic.broadcast_impl_value = _at_once_where_equal(TritonSemantic.broadcast_impl_value)
    block_type.with_element_ty = _made_once(block_type.with_element_ty)


def ordered_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """``InterpreterBuilder.create_dot`` that sums in the same order for every row, as a GPU's instructions do.

    The original calls NumPy's BLAS, whose sums depend on a row's place in its tile on some CPUs.
    """
    left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    products = np.zeros_like(d.data)
    for inner in range(left.shape[-1]):
        products += left[..., :, inner, None] * right[..., None, inner, :]
    return interpreter.TensorHandle(products + d.data, d.dtype.scalar)


def _scaled_product(
    rows: torch.Tensor, weight: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`torch._scaled_mm` with a scale per row and output, which torch 2.11 has on GPUs only."""
    product = (rows.float() * scale_a) @ (weight.float() * scale_b)
    return (product if bias is None else product + bias).to(out_dtype)


if DEVICE == "cpu" and torch.__version__.startswith(("2.11.", "2.12.")):
    vars(torch)["_scaled_mm"] = _scaled_product


def specialization(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a kernel for: constants, options, and of arguments whether they are 1 or divisible by 16."""
    parts: list[Any] = [launch.name, tuple(launch.constants.items()), tuple(launch.options.items())]
    declared = launch.kernel.kwargs  # of `triton.jit`
    of_any_value = declared.get("do_not_specialize") or ()
    of_any_alignment = declared.get("do_not_specialize_on_alignment") or ()
    names = [name for name in launch.kernel.arg_names if name not in launch.constants]
    for name, value in zip(names, launch.arguments, strict=True):
        if isinstance(value, torch.Tensor):
            offset = value.storage_offset() * value.element_size()
            parts.append((value.dtype, name in of_any_alignment or offset % 16 == 0))
        elif isinstance(value, int) and name not in of_any_value:
            parts.append((value == 1, value % 16 == 0))
    return tuple(parts)


_TORCH_TYPES = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _rounded_as_by_a_gpu(convert: Any) -> Any:
    """``_convert_float`` that rounds to 8 bits as GPUs do; the original drops a mantissa's carry: 1.99 becomes 1."""

    @functools.wraps(convert)
    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (source.name, target.name):
            return convert(data, source, target, rounding)
        numbers = torch.frombuffer(bytearray(data.tobytes()), dtype=_TORCH_TYPES[source.name])
        bits = numbers.to(_TORCH_TYPES[target.name]).view(torch.uint8).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    return converted


if DEVICE == "cpu":
    interpreter._convert_float = _rounded_as_by_a_gpu(interpreter._convert_float)
