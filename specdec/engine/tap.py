"""Hidden states handed out beside logits: which layers' are wanted, and those of one pass.

An id counts layers: k is what comes out of k layers, as it goes into the next one, 0 the embeddings. `FINAL` is what
the model's head reads, after the last layer and the final norm. (transformers' `output_hidden_states[k]` is k for all
but the last one, which is `FINAL`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

FINAL = -1
"""The id of what the model's head reads."""


@dataclass(slots=True)
class HiddenTap:
    """What one pass hands out; of several ranks each gathers it, and rank 0's is used."""

    layer_ids: tuple[int, ...]
    """Ids as above, each once."""
    states: torch.Tensor | None = None
    """[T, len(layer_ids), hidden] of all rows of the batch, in the model's dtype; set by the pass."""


class TapCollector:
    """Gathers a pass's states where they appear one after the other."""

    def __init__(self, tap: HiddenTap | None) -> None:
        """Without a tap nothing is wanted."""
        self._tap = tap
        self._ids = () if tap is None else tap.layer_ids
        self._found: dict[int, torch.Tensor] = {}

    def see(self, layer_id: int, states: torch.Tensor) -> None:
        """States [T, hidden] have come out of so many layers; copied if they are wanted."""
        if layer_id in self._ids:
            self._found[layer_id] = states.clone()

    def done(self) -> None:
        """The pass is over. Raises KeyError where the model has not shown what is wanted."""
        if self._tap is not None:
            self._tap.states = torch.stack([self._found[layer_id] for layer_id in self._ids], dim=1)


def joined(wanted: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """All ids that any of several wants, each once, rising."""
    return tuple(sorted({layer_id for ids in wanted for layer_id in ids}))
