"""Slots that were computed before their tokens were appended."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from specdec.engine.block_pool import BlockPool
from specdec.engine.errors import SequenceStateError
from specdec.engine.sequence import Sequence


class AheadSlots:
    """Keys and values behind sequences' computed tokens, with the tokens for which they were computed.

    Guarantee: a slot counts as computed only if the appended token is the one for which it was computed. All other
    slots are freed with their blocks before the next step.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holders: list[Sequence] = []

    def reserve(self, seq: Sequence, num_slots: int) -> int:
        """Make up to `num_slots` slots behind a sequence's tokens writable. Returns how many are.

        Like tree nodes they take free blocks only, without preemption. Returns 0 while nodes of the last step may still
        be accepted.

        Raises:
            SequenceStateError: tokens are pending.
        """
        num_pending = seq.num_pending_tokens
        if num_pending:
            raise SequenceStateError(f"{num_pending} tokens of sequence {seq.seq_id} are to be computed first")
        return self._make_writable(seq, len(seq.token_ids), num_slots)

    def borrow(self, seq: Sequence, num_slots: int) -> int:
        """Make up to `num_slots` slots writable behind the computed tokens. Returns how many are.

        As `reserve`, but the slots never count as computed: the next step overwrites all that it reads.
        """
        return self._make_writable(seq, seq.num_computed_tokens, num_slots)

    def _make_writable(self, seq: Sequence, first: int, num_slots: int) -> int:
        pool = self._pool
        if seq.verified_tree is not None:
            return 0
        index, offset = divmod(first, pool.block_size)
        if offset and not pool.is_writable(seq.block_ids[index]):
            return 0  # only a step copies shared blocks
        while num_slots > 0 and pool.num_blocks_to_write(seq.block_ids, first, num_slots) > pool.num_free:
            num_slots -= 1
        if num_slots > 0:
            pool.ensure_writable(seq.block_ids, first, num_slots)
            for index in range(first // pool.block_size, (first + num_slots - 1) // pool.block_size + 1):
                pool.check_write(seq.block_ids[index])
            self._holders.append(seq)
        return num_slots

    def hold(self, seq: Sequence, token_ids: Ids[int]) -> None:
        """Note that the slots behind a sequence's tokens hold keys and values of `token_ids`, which are not appended
        yet.
        """
        seq.ahead_token_ids = list(token_ids)

    def appending(self, seq: Sequence, token_ids: Ids[int]) -> None:
        """Forget the slots if the tokens to be appended differ from those that were computed."""
        expected = seq.ahead_token_ids[seq.num_pending_tokens :]
        if any(token != other for token, other in zip(token_ids, expected, strict=False)):
            seq.ahead_token_ids = []

    def is_known(self, seq: Sequence) -> bool:
        """Whether all pending tokens were computed ahead."""
        return 0 < seq.num_pending_tokens <= len(seq.ahead_token_ids)

    def take(self, seq: Sequence) -> None:
        """Count pending tokens that `is_known` as computed and served.

        Raises:
            SequenceStateError: they were not computed ahead.
        """
        if not self.is_known(seq):
            raise SequenceStateError(f"the pending tokens of sequence {seq.seq_id} were not computed ahead")
        del seq.ahead_token_ids[: seq.num_pending_tokens]
        seq.num_computed_tokens = seq.num_served_tokens = len(seq.token_ids)

    def release(self) -> None:
        """Free all slots that were not taken."""
        for seq in self._holders:
            seq.ahead_token_ids = []
            self.trim(seq)
        self._holders.clear()

    def trim(self, seq: Sequence) -> None:
        """Free a sequence's blocks behind its computed tokens and slots."""
        num_slots = seq.num_computed_tokens + len(seq.ahead_token_ids)
        num_kept = -(-num_slots // self._pool.block_size)
        if num_kept < len(seq.block_ids):
            dropped = seq.block_ids[num_kept:]
            del seq.block_ids[num_kept:]
            self._pool.free(dropped)
