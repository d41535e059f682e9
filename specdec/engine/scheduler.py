"""Decides which rows run in the next step, and which sequences lose blocks for them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from specdec.engine.block_pool import BlockPool
from specdec.engine.errors import SequenceTooLong
from specdec.engine.sequence import Sequence
from specdec.engine.states.sessions import ItemStates, NoStates, SequenceStates

_PRIORITY = attrgetter("priority")


@dataclass(slots=True)
class ScheduledItem:
    """One sequence's share of a step: tokens ``[start, start + num_new_tokens)``, then leading nodes of its tree."""

    seq: Sequence
    start: int
    """Number of computed tokens before the step."""
    num_new_tokens: int
    """Number of pending tokens to compute; zero only for a tree below an already computed token."""
    num_tree_nodes: int
    """Number of nodes to verify, a prefix of ``seq.tree``; node ``i`` writes logical slot ``len(token_ids) + i``."""
    completes: bool
    """Whether no token is pending afterwards."""
    states: ItemStates | None = None
    """States of recurrent layers; None: the model has none."""


@dataclass(slots=True)
class ScheduledStep:
    """One ragged batch: items, block copies to make before it, and preempted sequences."""

    items: list[ScheduledItem] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return sum(item.num_new_tokens + item.num_tree_nodes for item in self.items)


@dataclass(slots=True)
class SchedulerCounters:
    """Counters since the start."""

    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """Continuous batching by recomputation.

    Within a priority, decodes come before prefills and earlier arrivals before later ones. No priority takes rows from
    decodes, and trees leave at least half of the remaining rows to a waiting prefill. When blocks run out, sequences
    that rank below the one in need are preempted: paused first, then the lowest priority, then the latest arrival.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        max_batch_tokens: int,
        max_batch_seqs: int,
        max_model_len: int,
        states: SequenceStates | None = None,
    ) -> None:
        """Bounds are rows of a step, sequences of a step and tokens of a sequence. `states`: of recurrent layers."""
        self.states = states or NoStates()
        self.block_pool = block_pool
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_seqs = max_batch_seqs
        self.max_model_len = max_model_len
        self.counters = SchedulerCounters()
        self._turn = 0
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """All sequences, in order of arrival."""
        return self._sequences.values()

    def check_length(self, num_tokens: int) -> None:
        """Check that a sequence of this length could run.

        Raises:
            SequenceTooLong: it exceeds the context or the pool.
        """
        if num_tokens > self.max_model_len:
            raise SequenceTooLong(num_tokens, self.max_model_len, "context")
        capacity = self.block_pool.num_blocks * self.block_pool.block_size
        if num_tokens > capacity:
            raise SequenceTooLong(num_tokens, capacity, "KV cache")

    def holds(self, seq: Sequence) -> bool:
        """Whether the sequence was added and not removed."""
        return self._sequences.get(seq.seq_id) is seq

    def add(self, seq: Sequence) -> None:
        """Add a sequence; it runs as soon as a step has room.

        Raises:
            SequenceTooLong: it could never run.
        """
        self.check_length(len(seq.token_ids))
        self._sequences[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence and free its blocks; hashed ones stay in the prefix cache."""
        self.forget(seq)
        self.release(seq)

    def forget(self, seq: Sequence) -> None:
        """Remove a sequence whose blocks a device may still use; call `release` later."""
        del self._sequences[seq.seq_id]

    def preempt(self, seq: Sequence) -> None:
        """Free a sequence's blocks, to be recomputed later; its tokens and tree stay."""
        self.release(seq)
        self.counters.preemptions += 1

    def schedule(self, only: Container[int] | None = None) -> ScheduledStep:
        """Choose the next step's rows and allocate their blocks; an empty step: nothing can run.

        `only`: ids of sequences that may run; others may still lose blocks.

        Cost: linear in sequences and written blocks, not in contexts.
        """
        step = ScheduledStep()
        decodes, prefills = self._ready(only)
        if not decodes and not prefills:
            return step
        prefill_budget = self.max_batch_tokens
        for seq in decodes:
            prefill_budget -= seq.num_pending_tokens
        if prefills:
            wanted = sum(len(seq.tree) for seq in decodes if seq.tree is not None)
            prefill_budget -= min(wanted, prefill_budget // 2)
        self._place_all(step, decodes, prefills, prefill_budget)
        self._place_trees(step)
        for item in step.items:
            item.states, item.num_tree_nodes = self.states.plan(
                item.seq, item.start, item.num_new_tokens, item.num_tree_nodes, completes=item.completes
            )
        step.items = [item for item in step.items if item.num_new_tokens or item.num_tree_nodes]
        for item in step.items:
            self._turn += 1
            item.seq.last_turn = self._turn
        return step

    def _ready(self, only: Container[int] | None) -> tuple[list[Sequence], list[Sequence]]:
        """Ready sequences that one short chunk completes (decodes), and the others (prefills), in order."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._sequences.values():
            if not seq.is_ready or (only is not None and seq.seq_id not in only):
                continue
            if not self.states.settle(seq):
                self.release(seq)
            is_decode = seq.num_computed_tokens and seq.num_pending_tokens <= self.block_pool.block_size
            (decodes if is_decode else prefills).append(seq)
        if len(decodes) > self.max_batch_seqs:  # take turns
            decodes.sort(key=lambda seq: (seq.priority, seq.last_turn, seq.arrival))
        else:
            decodes.sort(key=_PRIORITY)  # arrivals are in order already
        prefills.sort(key=_PRIORITY)
        return decodes, prefills

    def _place_all(
        self, step: ScheduledStep, decodes: list[Sequence], prefills: list[Sequence], prefill_budget: int
    ) -> None:
        """Give pending tokens rows and blocks, by priority, decodes first."""
        budget = self.max_batch_tokens
        order = decodes if not prefills else sorted(decodes + prefills, key=_PRIORITY)
        waiting = {seq.seq_id for seq in prefills}
        for seq in order:
            if len(step.items) == self.max_batch_seqs or budget <= 0:
                break
            is_prefill = seq.seq_id in waiting
            limit = min(budget, prefill_budget) if is_prefill else budget
            if seq in step.preempted or (is_prefill and limit <= 0):
                continue
            num_new = self._place(seq, step, limit)
            if num_new is None:
                if is_prefill:
                    prefill_budget = 0  # no prefill overtakes one that waits for blocks
                continue
            budget -= num_new
            if is_prefill:
                prefill_budget -= num_new

    def _place(self, seq: Sequence, step: ScheduledStep, limit: int) -> int | None:
        """Add an item of at most `limit` tokens, with preemption. Returns its number of tokens, or None."""
        was_waiting = not seq.block_ids and seq.num_computed_tokens == 0
        if was_waiting:
            self._share_cached_prefix(seq)
        start = seq.num_computed_tokens
        pending = len(seq.token_ids) - start
        num_new = self.states.chunk(seq, min(pending, limit))
        # A sequence without blocks starts only if all of it fits: unfinished prefills would preempt each other.
        num_blocks = self._make_room(seq, step, pending if was_waiting else num_new)
        if num_blocks is None:
            if was_waiting:
                self.release(seq)
            return None
        self.states.reserve(seq)
        if num_blocks:
            step.copies += self.block_pool.ensure_writable(seq.block_ids, start, num_new)
        step.items.append(ScheduledItem(seq, start, num_new, 0, num_new == pending))
        if was_waiting:
            self._count_admission(seq)
        return num_new

    def _make_room(self, seq: Sequence, step: ScheduledStep, num_slots: int) -> int | None:
        """Preempt until `num_slots` more slots of `seq` and its states can be written. Returns the number of blocks to
        allocate for them; None: that is impossible.
        """
        pool, states = self.block_pool, self.states
        while True:
            needed = pool.num_blocks_to_write(seq.block_ids, seq.num_computed_tokens, num_slots)
            if needed <= pool.num_free and not states.is_short(seq):
                return needed
            victim = self._victim(seq, step)
            if victim is None:
                return None
            self.preempt(victim)
            step.preempted.append(victim)
            # A victim in the step has only a tree there.
            step.items = [item for item in step.items if item.seq is not victim]

    def _victim(self, seq: Sequence, step: ScheduledStep) -> Sequence | None:
        """The sequence to preempt for `seq`: the worst-ranked holder of blocks below it, outside this step.

        If the step would be empty, a better-ranked holder with nothing to compute is preempted, too: a sequence that
        waits for its client or network must not stop the engine.
        """
        taken = {item.seq.seq_id for item in step.items if item.num_new_tokens}
        holders = [
            other
            for other in self._sequences.values()
            if other.block_ids and other is not seq and other.seq_id not in taken
        ]
        worst = max(holders, key=lambda other: other.rank, default=None)
        if worst is not None and worst.rank > seq.rank:
            return worst
        if taken:
            return None
        idle = [other for other in holders if other.paused or other.is_idle or other.num_pending_tokens == 0]
        return max(idle, key=lambda other: other.rank, default=None)

    def _place_trees(self, step: ScheduledStep) -> None:
        """Add trees to items that complete, within the remaining rows, context and free blocks."""
        pool = self.block_pool
        budget = self.max_batch_tokens - step.num_tokens
        for item in step.items:
            tree = item.seq.tree
            if tree is None or not item.completes or budget <= 0:
                continue
            block_ids, length = item.seq.block_ids, len(item.seq.token_ids)
            num_nodes = min(len(tree), budget, self.max_model_len - length)
            while (needed := pool.num_blocks_to_write(block_ids, length, num_nodes)) > pool.num_free:
                num_nodes -= 1
            if num_nodes > 0:
                if needed:
                    step.copies += pool.ensure_writable(block_ids, length, num_nodes)
                item.num_tree_nodes = num_nodes
                budget -= num_nodes

    # --- prefix cache and release

    def _share_cached_prefix(self, seq: Sequence) -> None:
        """Share cached blocks of final tokens before the first token with logits."""
        pool = self.block_pool
        limit = min(seq.num_final_tokens, len(seq.token_ids) - 1)
        if seq.prompt_logits:
            limit = min(limit, seq.prompt_logits_from)
        if limit < pool.block_size:
            return
        blocks = pool.lookup(seq.token_ids, seq.cache_salt, seq.block_digests, limit // pool.block_size)
        del blocks[self.states.usable_prefix(seq, len(blocks)) :]
        pool.share(blocks)
        seq.block_ids.extend(blocks)
        seq.num_hashed_blocks = len(blocks)
        seq.num_computed_tokens = len(blocks) * pool.block_size

    def _count_admission(self, seq: Sequence) -> None:
        if not seq.prompt_logits:
            self.counters.prefix_query_tokens += len(seq.token_ids)
            self.counters.prefix_hit_tokens += seq.num_hashed_blocks * self.block_pool.block_size
        if not seq.admitted:
            seq.admitted = True
            seq.num_cached_tokens = seq.num_hashed_blocks * self.block_pool.block_size

    def release(self, seq: Sequence) -> None:
        """Free a sequence's blocks and states; none of its tokens is computed then."""
        self.states.release(seq)
        self.block_pool.free(seq.block_ids)
        del seq.block_ids[:]
        seq.num_computed_tokens = 0
        seq.num_hashed_blocks = 0
        seq.verified_tree = None
        seq.num_verified_nodes = 0
        seq.ahead_token_ids = []
