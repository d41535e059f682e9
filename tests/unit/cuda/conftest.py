"""What tests of kernels in Triton share."""

import pytest
from triton.runtime import interpreter

from tests.support.engine.triton_device import DEVICE, ordered_dot


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles have one order of sums for every row, as on a GPU."""
    if DEVICE != "cuda":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", ordered_dot)
