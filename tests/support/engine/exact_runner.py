"""A model whose keys and values are digests, for tests of the engine's bookkeeping.

A slot's content is a hash of its token, its position and the contents of the slots it attends to, in order of
position. One wrong, stale or missing slot in a row's past changes the row's logits. This is stricter than floats,
and the same on every machine.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from specdec.engine.batch import Batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.engine.states.sessions import SessionStates

NUM_LOGITS = 4


def slot_content(token_id: int, position: int, past: bytes) -> bytes:
    """Content that a row writes, given the contents of its past."""
    head = token_id.to_bytes(8, "little") + position.to_bytes(8, "little")
    return hashlib.blake2b(head + past, digest_size=8).digest()


@lru_cache(maxsize=50_000)
def prefix_contents(token_ids: tuple[int, ...]) -> bytes:
    """Contents of all slots of a sequence prefilled afresh."""
    if not token_ids:
        return b""
    past = prefix_contents(token_ids[:-1])
    return past + slot_content(token_ids[-1], len(token_ids) - 1, past)


def fresh_logits(token_ids: list[int]) -> torch.Tensor:
    """Logits [NUM_LOGITS] of the last token of a sequence prefilled afresh, without any cache."""
    for end in range(0, len(token_ids), 256):  # keeps the recursion shallow
        prefix_contents(tuple(token_ids[:end]))
    return _logits(prefix_contents(tuple(token_ids))[-8:])


def _logits(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint16).astype(np.float32))


class ExactRunner:
    """A runner that reads and writes only the slots of a batch, and refuses batches that break their rules."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.device = torch.device("cpu")
        self.block_size = block_size
        self.num_forwards = 0
        self.num_block_copies = 0
        self.num_slot_copies = 0
        self._slots = [b"unwritten" for _ in range(num_blocks * block_size)]

    def logits_of(self, content: bytes) -> torch.Tensor:
        """Logits of a row from the content of its slot."""
        return _logits(content)

    def block_contents(self, block: int) -> bytes:
        """Contents of a block's slots."""
        return b"".join(self._slots[block * self.block_size : (block + 1) * self.block_size])

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks one after the other."""
        for src, dst in pairs:
            first, size = dst * self.block_size, self.block_size
            self._slots[first : first + size] = self._slots[src * size : (src + 1) * size]
            self.num_block_copies += 1

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy slots, all read before any is written."""
        assert len(set(dst)) == len(dst) == len(src)
        contents = [self._slots[slot] for slot in src]
        for slot, content in zip(dst, contents, strict=True):
            self._slots[slot] = content
            self.num_slot_copies += 1

    def forward(self, batch: Batch) -> torch.Tensor:
        """As a layer does, all rows write before any reads: a slot written by a later row reads as garbage."""
        check_batch(batch)
        written = batch.slot_mapping.tolist()
        assert len(set(written)) == len(written), "two rows write one slot"
        for slot in written:
            self._slots[slot] = b"written by a later row"
        rows = zip(batch.input_ids.tolist(), batch.position_ids.tolist(), written, strict=True)
        for row, (token_id, position, slot) in enumerate(rows):
            past = attended_slots(batch, row, self.block_size)
            assert past.pop() == slot, "a row does not attend to itself last"
            self._slots[slot] = slot_content(token_id, position, b"".join(self._slots[i] for i in past))
        self.num_forwards += 1
        kept = [self.logits_of(self._slots[written[row]]) for row in batch.logits_indices.tolist()]
        return torch.stack(kept) if kept else torch.zeros(0, NUM_LOGITS)


def attended_slots(batch: Batch, row: int, block_size: int) -> list[int]:
    """Physical slots that a row reads, in order of position."""
    table = batch.block_tables[int(batch.row_seq[row])].tolist()
    slots = [table[i // block_size] * block_size + i % block_size for i in range(int(batch.context_lens[row]))]
    return slots + batch.path_slots[int(batch.path_offsets[row]) : int(batch.path_offsets[row + 1])].tolist()


def check_batch(batch: Batch) -> None:
    """Check the shapes, dtypes and sums that `Batch` guarantees."""
    num_rows = len(batch.input_ids)
    for name in ("input_ids", "position_ids", "slot_mapping", "logits_indices"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("row_seq", "context_lens", "path_offsets", "path_slots", "block_tables"):
        assert getattr(batch, name).dtype == torch.int32, name
    assert batch.position_ids.shape == batch.slot_mapping.shape == batch.row_seq.shape == (num_rows,)
    assert batch.path_offsets.shape == (num_rows + 1,)
    assert batch.block_tables.shape[0] == batch.num_seqs
    assert torch.equal(batch.context_lens + batch.path_offsets.diff(), batch.position_ids.int() + 1)
    assert bool((batch.row_seq.diff() >= 0).all())
    assert bool((batch.logits_indices.diff() > 0).all())


def make_engine(
    num_blocks: int = 32,
    block_size: int = 4,
    max_batch_tokens: int = 64,
    max_batch_seqs: int = 8,
    max_model_len: int = 96,
) -> tuple[Engine, ExactRunner]:
    """A small engine over an exact model."""
    runner = ExactRunner(num_blocks, block_size)
    pool = BlockPool(num_blocks, block_size)
    return Engine(runner, pool, Scheduler(pool, max_batch_tokens, max_batch_seqs, max_model_len)), runner


def assert_blocks_add_up(engine: Engine) -> None:
    """Check that every reference to a block is a table's, and that every block is in exactly one state."""
    pool = engine.block_pool
    held = [block for seq in engine.scheduler.sequences for block in seq.block_ids]
    assert [held.count(block) for block in range(pool.num_blocks)] == [
        pool._ref_counts[block] for block in range(pool.num_blocks)
    ]
    stats = pool.stats()
    assert stats.used == len(set(held))
    assert stats.used + stats.cached + stats.free == pool.num_blocks


def assert_states_add_up(states: SessionStates, sequences: Sequence[EngineSequence]) -> None:
    """Check that every reference to a state and to a row of kept inputs is a sequence's: at most two states each."""
    held = [state for seq in sequences if (state := states.held(seq)) is not None]
    slots = [slot for state in held for slot in (state.slot, state.next_slot) if slot is not None]
    rows = [row for state in held for row in state.rows.values()]
    for pool, used in ((states._slots, slots), (states._rows, rows)):
        assert [used.count(number) for number in range(pool.num_blocks)] == pool._ref_counts


def evict_all(pool: BlockPool) -> int:
    """Evict every cached block without an owner by allocating all; returns the number of cached blocks."""
    num_cached = pool.stats().cached
    pool.free(pool.allocate(pool.num_free))
    return num_cached
