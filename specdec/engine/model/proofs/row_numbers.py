"""Finds modules that take row numbers for positions, which is wrong in a batch of several sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SORTING = "transformers.integrations."
"""Modules that number rows only to sort them back: kernels of experts."""


class NumberedRows(TorchFunctionMode):
    """Records calls of ``torch.arange`` with as many numbers as a pass has rows."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self.places: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch."""
        result = func(*args, **(kwargs or {}))
        if func is torch.arange and result.numel() == self._num_rows:
            frame = sys._getframe(1)
            name = str(frame.f_globals.get("__name__"))
            if not name.startswith((_SORTING, "specdec.")):
                self.places.add(f"{name.rpartition('.')[2]}:{frame.f_lineno}")
        return result
