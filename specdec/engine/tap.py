"""Hidden states that a pass returns beside logits.

An id counts layers: k is the output of k layers, 0 the embeddings. `FINAL` is the input of the model's output layer,
after the last layer and the final norm. (transformers' `output_hidden_states[k]` is k for all but the last one, which
is `FINAL`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

FINAL = -1
"""Id of the output layer's input."""


@dataclass(slots=True)
class HiddenTap:
    """Hidden states of one pass; each rank collects them, and rank 0's are used."""

    layer_ids: tuple[int, ...]
    """Unique ids, as above."""
    states: torch.Tensor | None = None
    """[T, len(layer_ids), hidden] of all rows of the batch, in the model's dtype; set by the pass."""


class TapCollector:
    """Collects a pass's states layer by layer."""

    def __init__(self, tap: HiddenTap | None) -> None:
        """Without a tap it collects nothing."""
        self._tap = tap
        self._ids = () if tap is None else tap.layer_ids
        self._found: dict[int, torch.Tensor] = {}

    def see(self, layer_id: int, states: torch.Tensor) -> None:
        """Take states [T, hidden] of an id; copies them if wanted."""
        if layer_id in self._ids:
            self._found[layer_id] = states.clone()

    def done(self) -> None:
        """End the pass and fill the tap. Raises KeyError if a wanted state is missing."""
        if self._tap is not None:
            self._tap.states = torch.stack([self._found[layer_id] for layer_id in self._ids], dim=1)


def joined(wanted: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The union of several lists of ids, ascending."""
    return tuple(sorted({layer_id for ids in wanted for layer_id in ids}))
