"""Passes outside the engine's steps, over sequences' blocks and slots that no step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.model.fused import FusedDecoder
from specdec.engine.model.ragged import StepModel


@dataclass(slots=True)
class PassRows:
    """Rows of a pass: tokens, positions, and the slots that they read. A sequence's rows are adjacent."""

    block_size: int
    tables: list[Sequence[int]] = field(default_factory=list)
    """Block ids of each sequence."""
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """Physical slot that each row writes."""
    lines: list[int] = field(default_factory=list)
    """Index of its sequence in `tables`."""
    contexts: list[int] = field(default_factory=list)
    """Number of positions that each row reads through its table."""
    paths: list[list[int]] = field(default_factory=list)
    """Physical slots of later positions, its own last; empty if the table covers all."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_sequence(self, block_ids: Sequence[int]) -> None:
        """Begin a sequence with these blocks; later rows belong to it."""
        self.tables.append(block_ids)

    def add(self, token_id: int, position: int) -> None:
        """Add a token at its sequence's slot of a position; it reads all positions up to its own."""
        block, offset = divmod(position, self.block_size)
        self._add(token_id, position, self.tables[-1][block] * self.block_size + offset, position + 1, [])

    def add_apart(self, token_id: int, num_shared: int, path: list[int]) -> None:
        """Add a token that reads its sequence's first `num_shared` positions, then the slots of `path`, the last of
        which it writes.
        """
        self._add(token_id, num_shared + len(path) - 1, path[-1], num_shared, path)

    def _add(self, token_id: int, position: int, slot: int, context: int, path: list[int]) -> None:
        self.token_ids.append(token_id)
        self.positions.append(position)
        self.slots.append(slot)
        self.lines.append(len(self.tables) - 1)
        self.contexts.append(context)
        self.paths.append(path)

    def batch(self, device: torch.device) -> Batch:
        """The rows as a batch with logits of every row."""
        num_rows, width = len(self), max(1, max(map(len, self.tables)))
        tables = np.zeros((len(self.tables), width), np.int32)
        for line, table in zip(tables, self.tables, strict=True):
            line[: len(table)] = table

        def placed(values: object, dtype: type[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values, dtype)).to(device)

        return Batch(
            input_ids=placed(self.token_ids, np.int64),
            position_ids=placed(self.positions, np.int64),
            slot_mapping=placed(self.slots, np.int64),
            row_seq=placed(self.lines, np.int32),
            context_lens=placed(self.contexts, np.int32),
            path_offsets=placed(np.cumsum([0, *map(len, self.paths)]), np.int32),
            path_slots=placed([slot for path in self.paths for slot in path], np.int32),
            block_tables=placed(tables, np.int32),
            logits_indices=torch.arange(num_rows, device=device),
            num_seqs=len(self.tables),
        )


def prompt_rows(token_ids: Sequence[int], block_size: int) -> PassRows:
    """Rows of a whole sequence, in the first blocks of a cache."""
    rows = PassRows(block_size)
    rows.add_sequence(range(-(-len(token_ids) // block_size)))
    for position, token in enumerate(token_ids):
        rows.add(token, position)
    return rows


@dataclass(frozen=True, slots=True)
class SkippingPass:
    """Runs a model without some sublayers, over the model's own cache."""

    step_model: StepModel
    cache: KVCache
    fused: FusedDecoder | None
    """`step_model` if it is a fused decoder, else None."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Logits ``[R, num_logits]`` float32 of one pass."""
        with torch.inference_mode():
            return self.step_model(batch, self.cache)
