"""Memory of recurrent layers: committed states in slots, kept inputs in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from specdec.engine.errors import ModelLoadError

_STATE_BYTES = torch.float32.itemsize
_SHARE = 2  # of the cache's memory at most 1 / _SHARE for states, and as much of that for kept inputs
_SNAPSHOTS = 64  # slots beyond those of running sequences


@dataclass(frozen=True, slots=True)
class CellShape:
    """Sizes of one recurrence of a layer."""

    state: tuple[int, ...]
    """Shape of a state."""
    kept_width: int
    """Numbers that a token's inputs take."""


class StateMemory:
    """States and kept inputs of all recurrences of a model, float32. Recurrences are numbered in the order of calls."""

    def __init__(self, shapes: Sequence[CellShape], num_slots: int, num_rows: int, device: torch.device) -> None:
        self.num_slots, self.num_rows = num_slots, num_rows
        self.states = [torch.zeros(num_slots, *shape.state, device=device) for shape in shapes]
        self.kept = [torch.zeros(num_rows, shape.kept_width, device=device) for shape in shapes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.states, *self.kept))


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Numbers of slots and rows, and their bytes."""

    num_slots: int = 0
    num_rows: int = 0
    num_bytes: int = 0


def affordable_states(
    shapes: Sequence[CellShape], budget: int, *, max_batch_seqs: int, max_batch_tokens: int, block_size: int
) -> StateSizes:
    """Sizes within half of a cache's budget: two slots per sequence of a step and some snapshots; rows for its tails.

    Raises ModelLoadError if the budget holds too few.
    """
    if not shapes:
        return StateSizes()
    slot_bytes = sum(prod(shape.state) for shape in shapes) * _STATE_BYTES
    row_bytes = sum(shape.kept_width for shape in shapes) * _STATE_BYTES
    most_rows = max_batch_tokens + 2 * block_size * max_batch_seqs
    num_rows = min(most_rows, budget // (_SHARE * _SHARE) // row_bytes)
    num_slots = min(2 * max_batch_seqs + _SNAPSHOTS, (budget // _SHARE - num_rows * row_bytes) // slot_bytes)
    if num_slots < 2 or num_rows < 2 * block_size:
        raise ModelLoadError(
            f"kv_cache_memory_bytes: half of {budget} bytes must hold at least two states of {slot_bytes} bytes and "
            f"{2 * block_size} rows of kept inputs of {row_bytes} bytes; raise it"
        )
    return StateSizes(num_slots, num_rows, num_slots * slot_bytes + num_rows * row_bytes)
