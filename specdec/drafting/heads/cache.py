"""Keys and values of a head, in the target's own blocks.

Token j's entry has the same physical slot as the target's keys and values of token j. So the head shares the target's
blocks, forks, prefix cache and preemption, and needs no pool of its own. Drafted tokens use scratch slots behind the
target's blocks, which are reused after each draft.

Some slots have no entry: the head was loaded after the token, or was not asked for its session. Rows attend from the
first whole block after the last such slot. A missing entry, or one of another continuation (the last entry of a block
that the prefix cache shares), lowers acceptance but changes no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.drafting.heads.parts import Attend
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionKernel, AttentionOptions, ForwardContext
from specdec.engine.batch import Batch, to_device
from specdec.engine.sequence import Sequence as EngineSequence

NUM_SCRATCH_SLOTS = 4096
"""Scratch slots for all tokens that are drafted at once, over all sessions."""


@dataclass(slots=True)
class Rows:
    """Rows of a head's pass: where each writes and what it reads. A session's rows are adjacent."""

    slots: list[int] = field(default_factory=list)
    """Physical slot of each row's own entry."""
    token_ids: list[int] = field(default_factory=list)
    """Token that each row embeds beside its states."""
    positions: list[int] = field(default_factory=list)
    """Position in the text, for rotary embeddings."""
    contexts: list[int] = field(default_factory=list)
    """Number of entries that each row reads from its sequence's `tables`."""
    paths: list[list[int]] = field(default_factory=list)
    """Further slots that each row reads, in order; with its own, unless `contexts` covers it."""
    lines: list[int] = field(default_factory=list)
    """Index of its sequence in `tables`."""
    tables: list[Sequence[int]] = field(default_factory=list)
    """Block ids of each sequence, from the first that is read."""

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Rows of a head's pass as tensors on its device."""

    batch: Batch
    """The rows for attention; its positions are the numbers of entries read, minus 1."""
    positions: torch.Tensor
    """[T] int64, positions in the text."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[T] int64."""
        return self.batch.input_ids

    @property
    def slots(self) -> torch.Tensor:
        """[T] int64, slots to which entries are written."""
        return self.batch.slot_mapping


class HeadCache:
    """Keys and values of all layers of a head. Not thread-safe."""

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        options: AttentionOptions,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Callable[[Sequence[LayerGeometry]], AttentionKernel],
    ) -> None:
        """`options`: of all layers; `num_blocks`: the target's number of blocks; `kernel`: makes attention for
        layers of a geometry.
        """
        num_scratch = -(-NUM_SCRATCH_SLOTS // block_size) + 1
        self.block_size = block_size
        self.first_scratch_slot = num_blocks * block_size
        self.spare_block = num_blocks + num_scratch - 1
        """Block that padding rows write to."""
        self._cache = KVCache(layers, num_blocks + num_scratch, block_size, dtype, device)
        self._kernel = kernel(self._cache.geometries)
        self._options = options
        self._has_entry = np.zeros(num_blocks * block_size, dtype=bool)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache."""
        return self._cache.num_bytes

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._cache.device

    def slots_of(self, seq: EngineSequence, start: int, end: int) -> list[int]:
        """Physical slots of tokens [start, end); fewer if the sequence lacks blocks for them."""
        size, blocks = self.block_size, seq.block_ids
        end = min(end, len(blocks) * size)
        return [blocks[index // size] * size + index % size for index in range(start, end)]

    def forget(self, slots: Sequence[int]) -> None:
        """Mark slots that the target has overwritten as without entry."""
        self._has_entry[slots] = False

    def keep(self, slots: Sequence[int]) -> None:
        """Mark slots as having an entry."""
        self._has_entry[slots] = True

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy entries as the target has copied whole blocks (source, destination), in order."""
        pairs = list(pairs)
        self._cache.copy_blocks(pairs)
        by_block = self._has_entry.reshape(-1, self.block_size)
        for source, destination in pairs:
            by_block[destination] = by_block[source]

    def first_block(self, seq: EngineSequence, num_tokens: int) -> int:
        """Index of the first block from which all tokens below `num_tokens` have entries."""
        size = self.block_size
        blocks = (
            np.frombuffer(seq.block_ids, dtype=np.int32)[: -(-num_tokens // size)] if num_tokens else np.zeros(0, int)
        )
        has = self._has_entry.reshape(-1, size)[blocks].reshape(-1)[:num_tokens]
        holes = np.flatnonzero(~has)
        return 0 if not len(holes) else int(holes[-1]) // size + 1

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [T, kv heads, d] without attending."""
        self._cache.write(layer, slots, keys, values)

    def attend(self, batch: Batch) -> Attend:
        """Attention for these rows. In each layer it writes their entries before it reads any."""
        context = ForwardContext(batch, self._cache, self._kernel)

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._kernel(query, key, value, layer, context, self._options)

        return attend

    def lay_out(self, rows: Rows) -> LaidOut:
        """Rows as tensors. Cost: one copy to the device."""
        num_rows = len(rows)
        width = max(1, max((len(table) for table in rows.tables), default=1))
        tables = np.zeros((len(rows.tables), width), np.int32)
        for line, table in zip(tables, rows.tables, strict=True):
            line[: len(table)] = table
        lengths = np.array([len(path) for path in rows.paths], np.int32)
        contexts = np.array(rows.contexts, np.int32)
        (ids, reads, slots, positions, logits), (lines, context_lens, offsets, paths, blocks) = to_device(
            [
                np.array(rows.token_ids, np.int64),
                (contexts + lengths - 1).astype(np.int64),
                np.array(rows.slots, np.int64),
                np.array(rows.positions, np.int64),
                np.arange(num_rows),
            ],
            [
                np.array(rows.lines, np.int32),
                contexts,
                np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]),
                np.array([slot for path in rows.paths for slot in path], np.int32),
                tables.reshape(-1),
            ],
            self.device,
        )
        batch = Batch(
            input_ids=ids,
            position_ids=reads,
            slot_mapping=slots,
            row_seq=lines,
            context_lens=context_lens,
            path_offsets=offsets,
            path_slots=paths,
            block_tables=blocks.view(tables.shape),
            logits_indices=logits,
            num_seqs=len(rows.tables),
        )
        return LaidOut(batch, positions)
