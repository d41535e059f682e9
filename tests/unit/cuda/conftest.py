"""What tests of kernels in Triton share."""

from typing import Any

import numpy as np
import pytest

from tests.support.engine.triton_device import DEVICE


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles in one order for every row, as a GPU's instructions do.

    It asks NumPy's BLAS otherwise, whose sums depend on where a row lies in its tile, on some CPUs.
    """
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        products = np.zeros_like(d.data)
        for inner in range(left.shape[-1]):
            products += left[..., :, inner, None] * right[..., None, inner, :]
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
