"""Reads the mask that a model declares for each layer, as a rule instead of a tensor.

transformers' models build masks through functions that are registered by name, and pass one to each layer. While
`declared_masks` is active, the paged attention's name has a function that returns a `DeclaredMask`. Otherwise it has
none, so that serving builds no masks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


@dataclass(frozen=True, slots=True)
class DeclaredMask:
    """A layer's mask: the row at position p reads positions p - window + 1 to p; None: all up to p."""

    window: int | None = None
    other: str = ""
    """Why the mask is neither causal nor a sliding window; "" if it is."""


@contextmanager
def declared_masks(name: str, num_positions: int) -> Iterator[None]:
    """Models with attention `name` pass a `DeclaredMask` to each layer, for contexts of `num_positions`.

    Not while serving.
    """
    functions: Any = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    functions[name] = partial(_declared, num_positions)
    try:
        yield
    finally:
        functions.pop(name, None)


def _declared(
    num_positions: int, *, mask_function: Callable[..., Any], device: torch.device | str, **_: Any
) -> DeclaredMask:
    """The first row that does not read position 0 gives the window; rows beside its multiples confirm it."""
    device = "cpu" if torch.device(device).type == "meta" else device
    positions = torch.arange(num_positions, device=device)

    def visible(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(mask_function(0, 0, rows, keys), device=device).expand(num_positions)

    blind = ~visible(positions, torch.zeros_like(positions))
    window = int(blind.int().argmax()) if bool(blind.any()) else None
    beside = {count * (window or 1) + one for count in range(4) for one in (-1, 0, 1)}
    for position in beside | {num_positions // 2, num_positions - 1}:
        if not 0 <= position < num_positions:
            continue
        seen = visible(torch.full_like(positions, position), positions)
        first = 0 if window is None else position - window + 1
        if torch.equal(seen, (positions >= first) & (positions <= position)):
            continue
        if window is None:
            return DeclaredMask(other=f"its mask is not causal at position {position}")
        return DeclaredMask(other="its mask is no sliding window (chunked attention?)")
    return DeclaredMask(window=window)
