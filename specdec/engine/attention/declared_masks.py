"""Which mask a model declares for each layer, as what it means instead of a tensor.

transformers' models build masks through an interface of functions by name, and hand each layer one of them. While
`declared_masks` is active the paged attention's name has such a function, which returns a `DeclaredMask`. Outside of it
the name has none: models build no mask, and each pass of a served model is cheaper for it.
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
    """What the mask of a layer lets the row at position p read: positions > p - window; None: all up to p."""

    window: int | None = None
    other: str = ""
    """Why the mask is neither causal nor a sliding window; "": it is one of them."""


@contextmanager
def declared_masks(name: str, num_positions: int) -> Iterator[None]:
    """Models whose attention is called `name` hand each layer the `DeclaredMask` of a context of this length.

    Not at the same time as serving.
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
    """The first row that does not read position 0 tells the window; rows beside its multiples show if it is one."""
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
            return DeclaredMask(other=f"its mask leaves out keys of the row at {position}, or shows it later ones")
        return DeclaredMask(other="its mask is chunked, or otherwise no window: what a row reads goes by its position")
    return DeclaredMask(window=window)
