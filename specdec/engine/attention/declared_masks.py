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


def _declared(num_positions: int, *, mask_function: Callable[..., Any], config: Any, **_: Any) -> DeclaredMask:
    limits = (getattr(config, attribute, None) for attribute in ("sliding_window", "attention_chunk_size"))
    limit = max((int(value) for value in limits if isinstance(value, int)), default=0)
    found: set[int | None] = set()
    examined = (0, 1, limit - 1, limit, limit + limit // 2, 2 * limit + 3, num_positions - 1)
    for position in {position for position in examined if 0 <= position < num_positions}:
        keys = torch.arange(position + 1)
        query = torch.full_like(keys, position)
        visible = torch.as_tensor(mask_function(0, 0, query, keys)).expand(position + 1)
        count = int(visible.sum())
        if not bool(visible[position + 1 - count :].all()):
            return DeclaredMask(other="its mask leaves out keys between those that it lets rows read")
        found.add(None if count == position + 1 else count)
    windows = found - {None}
    if len(windows) > 1:
        return DeclaredMask(other="its mask is chunked: how far back a row reads depends on its position")
    return DeclaredMask(window=windows.pop() if windows else None)
