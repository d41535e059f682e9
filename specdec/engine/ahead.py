"""Slots that were computed before their tokens were appended: what is drawn ahead of a sequence, until it is known to
be wanted.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

from specdec.engine.block_pool import BlockPool
from specdec.engine.errors import SequenceStateError
from specdec.engine.sequence import Sequence


class AheadSlots:
    """Keys and values past the computed tokens of sequences, each with the token that they are of.

    Guarantee: only what was computed for the very tokens that were appended is ever taken for computed. Everything else
    is given back with the blocks it is in, at the latest before the next step.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holders: list[Sequence] = []

    def reserve(self, seq: Sequence, num_slots: int) -> int:
        """Make up to `num_slots` slots past a sequence's tokens writable; returns how many are.

        As tree nodes do, they take free blocks only, and nobody gives up any for them. None are where nodes of the last
        step wait there to be accepted.

        Raises:
            SequenceStateError: tokens are pending, which come first.
        """
        num_pending = seq.num_pending_tokens
        if num_pending:
            raise SequenceStateError(f"{num_pending} tokens of sequence {seq.seq_id} are to be computed first")
        return self._make_writable(seq, len(seq.token_ids), num_slots)

    def borrow(self, seq: Sequence, num_slots: int) -> int:
        """Make up to `num_slots` slots writable from the first on that is not computed; returns how many are.

        As `reserve`, but for what is never taken for computed: the next step writes all anew that it reads.
        """
        return self._make_writable(seq, seq.num_computed_tokens, num_slots)

    def _make_writable(self, seq: Sequence, first: int, num_slots: int) -> int:
        pool = self._pool
        if seq.verified_tree is not None:
            return 0
        index, offset = divmod(first, pool.block_size)
        if offset and not pool.is_writable(seq.block_ids[index]):
            return 0  # to copy it is a step's business
        while num_slots > 0 and pool.num_blocks_to_write(seq.block_ids, first, num_slots) > pool.num_free:
            num_slots -= 1
        if num_slots > 0:
            pool.ensure_writable(seq.block_ids, first, num_slots)
            for index in range(first // pool.block_size, (first + num_slots - 1) // pool.block_size + 1):
                pool.check_write(seq.block_ids[index])
            self._holders.append(seq)
        return num_slots

    def hold(self, seq: Sequence, token_ids: Ids[int]) -> None:
        """The slots past a sequence's tokens now hold the keys and values of these, of which none is appended yet."""
        seq.ahead_token_ids = list(token_ids)

    def appending(self, seq: Sequence, token_ids: Ids[int]) -> None:
        """Tokens are about to be appended: where others were computed, nothing of that is of use."""
        expected = seq.ahead_token_ids[seq.num_pending_tokens :]
        if any(token != other for token, other in zip(token_ids, expected, strict=False)):
            seq.ahead_token_ids = []

    def is_known(self, seq: Sequence) -> bool:
        """Whether all that is pending of a sequence was computed ahead."""
        return 0 < seq.num_pending_tokens <= len(seq.ahead_token_ids)

    def take(self, seq: Sequence) -> None:
        """Pending tokens that `is_known` are computed, and served by whoever has drawn what follows them.

        Raises:
            SequenceStateError: they are not known.
        """
        if not self.is_known(seq):
            raise SequenceStateError(f"nothing was computed ahead for what sequence {seq.seq_id} has pending")
        del seq.ahead_token_ids[: seq.num_pending_tokens]
        seq.num_computed_tokens = seq.num_served_tokens = len(seq.token_ids)

    def release(self) -> None:
        """Give back all that was not taken."""
        for seq in self._holders:
            seq.ahead_token_ids = []
            self.trim(seq)
        self._holders.clear()

    def trim(self, seq: Sequence) -> None:
        """Free a sequence's blocks past what is computed, and computed ahead."""
        num_slots = seq.num_computed_tokens + len(seq.ahead_token_ids)
        num_kept = -(-num_slots // self._pool.block_size)
        dropped = seq.block_ids[num_kept:]
        if dropped:
            del seq.block_ids[num_kept:]
            self._pool.free(dropped)
