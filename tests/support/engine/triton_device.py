"""Where kernels in Triton run in tests: on a GPU, or without one in Triton's interpreter (see tests/conftest.py)."""

import os
from typing import Any

import numpy as np
from triton.runtime import interpreter

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def ordered_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """``InterpreterBuilder.create_dot`` that multiplies tiles in one order for every row, as a GPU's instructions do.

    The interpreter asks NumPy's BLAS otherwise, whose sums depend on where a row lies in its tile, on some CPUs.
    """
    left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    products = np.zeros_like(d.data)
    for inner in range(left.shape[-1]):
        products += left[..., :, inner, None] * right[..., None, inner, :]
    return interpreter.TensorHandle(products + d.data, d.dtype.scalar)
