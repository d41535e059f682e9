"""One inference engine, for draft and target: schedule, run, postprocess.

A step is `launch`, then `collect`:

    scheduled = scheduler.schedule(only)       # prompt chunks, next tokens, trees; may preempt sequences
    observer.pass_chosen(sequences)
    runner.copy_blocks(shared blocks that are written to); observer.blocks_copied(...)
    batch = build_batch(scheduled)
    observer.pass_begins(items)
    flight = launch_pass(batch)                # on a GPU; else runner.forward(batch), which takes its time here
    ...                                        # on a GPU the caller does something else meanwhile
    logits = flight.logits()                   # raises what the pass has raised
    every sequence advances; its full blocks of final tokens are offered to the prefix cache
    return StepOutput(logits, each item's rows)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ids

from specdec.engine.ahead import AheadSlots
from specdec.engine.batch import Batch, build_batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.errors import KVInvariantError, SequenceStateError, TreeError
from specdec.engine.flight import Flight
from specdec.engine.outputs import EngineStats, ItemOutput, StepOutput
from specdec.engine.runner import DeviceMemory, LaunchedPass, PassObserver, Runner
from specdec.engine.scheduler import ScheduledStep, Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.tap import HiddenTap


class Engine:
    """Sequences, their KV cache and the steps over them.

    Guarantee: after any order of appends, trees, rollbacks, forks, preemptions and evictions, a row's logits equal
    those of its own tokens computed afresh. Not thread-safe.
    """

    def __init__(
        self,
        runner: Runner,
        block_pool: BlockPool,
        scheduler: Scheduler,
        launch_pass: Callable[[Batch], LaunchedPass] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """`launch_pass` begins passes that a device computes meanwhile; None: `runner.forward` computes them. `memory`
        may be given back where too little is free."""
        self.runner = runner
        self.block_pool = block_pool
        self.scheduler = scheduler
        self.ahead = AheadSlots(block_pool)
        """Slots that roles compute between steps."""
        self.launch_pass = launch_pass
        self.tap_ids: tuple[int, ...] = ()
        """Hidden states that steps return, by the ids of `specdec.engine.tap`."""
        self._memory = memory
        self._memory_faults = 0
        self._ids = itertools.count()
        self._flight: Flight | None = None  # launched and not collected
        self._unaccepted: list[Sequence] = []  # verified in the last step
        self._in_step: list[Sequence] | None = None  # the last step's sequences; None: not scheduled yet
        self._rollbacks = 0
        self._rollback_tokens = 0

    # --- sequences

    def add(
        self,
        token_ids: Iterable[int],
        *,
        num_prompt_tokens: int,
        priority: int = 0,
        cache_salt: bytes = b"",
        prompt_logits: bool = False,
        prompt_logits_from: int = 0,
    ) -> Sequence:
        """Add a sequence of committed tokens, which are all final.

        Raises:
            SequenceTooLong: it exceeds the context or the pool, so it could never run.
            SequenceStateError: it is empty, or its prompt is longer than its tokens.
        """
        tokens = list(token_ids)
        if not 0 < num_prompt_tokens <= len(tokens):
            raise SequenceStateError(f"a prompt of {num_prompt_tokens} tokens in a sequence of {len(tokens)}")
        seq_id = next(self._ids)
        seq = Sequence(
            seq_id=seq_id,
            token_ids=tokens,
            num_prompt_tokens=num_prompt_tokens,
            num_final_tokens=len(tokens),
            priority=priority,
            arrival=seq_id,
            cache_salt=cache_salt,
            prompt_logits=prompt_logits,
            prompt_logits_from=prompt_logits_from,
        )
        self.scheduler.add(seq)
        return seq

    def fork(self, parent: Sequence) -> Sequence:
        """A second sequence with the parent's tokens; blocks are shared until either writes (copy-on-write).

        The tree and pending prompt logits stay with the parent. Cost: one copy of the token ids and the block table.

        Raises:
            SequenceStateError: the parent was freed, or a step is launched and not collected.
        """
        self._check_held(parent)
        self._check_landed()
        child = parent.forked(next(self._ids), self._num_blocks(parent.num_computed_tokens))
        self.block_pool.share(child.block_ids)
        self.scheduler.states.fork(parent, child)
        self.scheduler.add(child)
        return child

    def free(self, seq: Sequence) -> None:
        """Remove a sequence; its hashed blocks stay in the prefix cache.

        Between `launch` and `collect` it keeps its blocks until the device is done; that step's result for it is
        dropped.

        Raises:
            SequenceStateError: it was freed before.
        """
        self._check_held(seq)
        if self._flight is None:
            self.scheduler.remove(seq)
        else:
            self.scheduler.forget(seq)
            self._flight.freed.append(seq)

    def distrust(self, seq: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache, as their content may be wrong."""
        self._check_held(seq)
        self.block_pool.forget(seq.block_ids)
        self.scheduler.states.forget(seq)

    def append(self, seq: Sequence, token_ids: Ids[int]) -> None:
        """Add tokens, to be computed by the next steps.

        Verified nodes are forgotten, and a waiting tree is dropped, as it was below another token.

        Raises:
            SequenceTooLong: the context or the pool cannot hold them; nothing is added then.
            SequenceStateError: a step is launched and not collected.
        """
        self._check_landed()
        self.scheduler.check_length(len(seq.token_ids) + len(token_ids))
        if seq.ahead_token_ids:
            self.ahead.appending(seq, token_ids)
        if seq.verified_tree is not None:
            self._forget_nodes(seq)
        seq.tree = None
        seq.token_ids.extend(token_ids)

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Cut a sequence to its first `num_tokens` tokens; whole blocks past the end are freed.

        If the cut is at the end of a prefill chunk, no step has given the last token's logits, so that it is computed
        again. Cost: linear in the dropped tokens.

        Raises:
            SequenceStateError: final tokens would be dropped, the sequence is shorter, or a step is launched and not
                collected.
        """
        self._check_landed()
        num_dropped = len(seq.token_ids) - num_tokens
        if num_tokens < seq.num_final_tokens or num_dropped < 0:
            lengths = f"{seq.num_final_tokens} final tokens, {len(seq.token_ids)} in all"
            raise SequenceStateError(f"rollback to {num_tokens} tokens of a sequence with {lengths}")
        seq.tree = None
        seq.ahead_token_ids = []
        del seq.token_ids[num_tokens:]
        seq.num_computed_tokens = min(seq.num_computed_tokens, num_tokens)
        seq.num_served_tokens = min(seq.num_served_tokens, num_tokens)
        if seq.num_served_tokens < seq.num_computed_tokens == num_tokens:
            seq.num_computed_tokens -= 1
        self._forget_nodes(seq)
        self._rollbacks += 1
        self._rollback_tokens += num_dropped

    def finalize(self, seq: Sequence, num_final_tokens: int) -> None:
        """Declare the first `num_final_tokens` tokens final, and add newly full blocks to the prefix cache.

        Raises:
            SequenceStateError: `num_final_tokens` is below the present number, or above the sequence's length.
        """
        if not seq.num_final_tokens <= num_final_tokens <= len(seq.token_ids):
            lengths = f"{seq.num_final_tokens} final tokens, {len(seq.token_ids)} in all"
            raise SequenceStateError(f"{num_final_tokens} final tokens in a sequence with {lengths}")
        seq.num_final_tokens = num_final_tokens
        self._hash_final_blocks(seq)

    def accept(self, seq: Sequence, node_indices: Ids[int]) -> None:
        """Append the accepted path, from the root, of the tree that the last step verified; forget its other nodes.

        Keys and values of the path move to their tokens' slots; those of a chain are there already. Call it before any
        other change of the sequence and before the next step.

        Raises:
            TreeError: not a path from the root, or a node that was not verified.
            SequenceStateError: the last step verified no tree of this sequence, or is launched and not collected.
        """
        self._check_landed()
        tree = seq.verified_tree
        if tree is None:
            raise SequenceStateError("the last step verified no tree of this sequence")
        tree.check_path(node_indices)
        if node_indices and node_indices[-1] >= seq.num_verified_nodes:
            raise TreeError("nodes", f"node {node_indices[-1]} is not among the {seq.num_verified_nodes} verified")
        length = len(seq.token_ids)
        if self._move_nodes(seq, node_indices):
            seq.num_computed_tokens = length + len(node_indices)
        seq.token_ids += [tree.token_ids[node] for node in node_indices]
        seq.num_served_tokens = len(seq.token_ids)
        self._forget_nodes(seq)

    # --- steps

    def step(self, only: Container[int] | None = None) -> StepOutput | None:
        """Run one batch; None if nothing can run. Completed sequences have no pending token afterwards.

        Trees of the previous step are forgotten unless accepted. `only`: ids of the sequences that may run. If it
        raises, no sequence has advanced, and `abandon_step` must be called next.
        """
        return self.collect() if self.launch(only) else None

    def launch(self, only: Container[int] | None = None, observer: PassObserver | None = None) -> bool:
        """The first half of `step`: choose a batch and start to compute it. Returns False if nothing can run.

        Until `collect` no sequence advances; sequences may be added and freed, but not changed.

        Raises:
            SequenceStateError: the previous step was not collected.
        """
        observer = observer or PassObserver()
        self._check_landed()
        self._in_step = None
        self.ahead.release()
        for seq in self._unaccepted:
            if seq.verified_tree is not None:
                self._forget_nodes(seq)
            self.scheduler.states.settle(seq)  # a sequence that does not run now would keep its nodes' rows
        self._unaccepted = []
        scheduled = self.scheduler.schedule(only)
        self._in_step = [item.seq for item in scheduled.items]
        if not scheduled.items:
            return False
        observer.pass_chosen(self._in_step)
        if scheduled.copies:
            self.runner.copy_blocks(scheduled.copies)
            observer.blocks_copied(scheduled.copies)
        self._check_writes(scheduled)
        batch, items = build_batch(scheduled, self.block_pool.block_size, self.runner.device)
        observer.pass_begins(scheduled.items)
        if self.tap_ids:
            batch.tap = HiddenTap(self.tap_ids)
        compute = self.launch_pass or self.runner.forward
        self._flight = Flight(scheduled, items, batch, compute(batch))
        return True

    def is_done(self) -> bool:
        """Whether the device has finished the launched step, so that `collect` does not wait."""
        return self._flight is None or self._flight.is_done()

    @property
    def launched(self) -> Flight | None:
        """The step that is launched and not collected."""
        return self._flight

    @property
    def num_launched_rows(self) -> int:
        """Rows of the launched batch; 0 if none is launched."""
        return 0 if self._flight is None else self._flight.scheduled.num_tokens

    def collect(self) -> StepOutput:
        """The second half of `step`: wait for the launched batch and return its output.

        Raises:
            SequenceStateError: nothing is launched.
        """
        flight = self._flight
        if flight is None:
            raise SequenceStateError("no step is launched")
        logits = flight.logits()
        self._flight = None
        for item in flight.items:
            if item.seq not in flight.freed:
                self._advance(item)
        for seq in flight.freed:
            self.scheduler.release(seq)
        return flight.output(logits)

    def num_waiting_tokens(self) -> int:
        """Tokens to compute of ready sequences that have had no logits yet."""
        return sum(
            seq.num_pending_tokens for seq in self.scheduler.sequences if seq.is_ready and not seq.num_served_tokens
        )

    def abandon_step(self) -> list[Sequence]:
        """Preempt the sequences of a step that raised, as the content of their blocks is unknown.

        Returns the step's sequences, some of which may have been freed since; all ready ones if it was not scheduled.
        """
        flight, self._flight = self._flight, None
        for seq in () if flight is None else flight.freed:
            self.scheduler.release(seq)
        sequences = list(self.scheduler.sequences)
        batch = [seq for seq in sequences if seq.is_ready] if self._in_step is None else self._in_step
        for seq in sequences if self._in_step is None else batch:
            if seq.block_ids:
                self.scheduler.preempt(seq)
            seq.tree = None
        return batch

    def release_memory(self) -> None:
        """Give back device memory that only makes steps faster, after too little was free."""
        self._memory_faults += 1
        if self._memory is not None:
            self._memory.release_memory()

    def stats(self) -> EngineStats:
        """Gauges and counters; `running` sequences hold blocks, `waiting` ones do not."""
        blocks = self.block_pool.stats()
        counters = self.scheduler.counters
        running = sum(1 for seq in self.scheduler.sequences if seq.block_ids)
        return EngineStats(
            blocks_used=blocks.used,
            blocks_cached=blocks.cached,
            blocks_total=self.block_pool.num_blocks,
            running=running,
            waiting=len(self.scheduler) - running,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            preemptions=counters.preemptions,
            rollbacks=self._rollbacks,
            rollback_tokens=self._rollback_tokens,
            num_graphs=0 if self._memory is None else self._memory.num_graphs,
            memory_faults=self._memory_faults,
        )

    def _check_writes(self, scheduled: ScheduledStep) -> None:
        """Check that every write goes into an unhashed block with one owner, behind the computed tokens."""
        block_size = self.block_pool.block_size
        for item in scheduled.items:
            end = item.start + item.num_new_tokens + item.num_tree_nodes
            if item.start != item.seq.num_computed_tokens or end > len(item.seq.block_ids) * block_size:
                raise KVInvariantError(f"sequence {item.seq.seq_id} would write slots {item.start} to {end}")
            for index in range(item.start // block_size, (end - 1) // block_size + 1):
                self.block_pool.check_write(item.seq.block_ids[index])

    def _advance(self, item: ItemOutput) -> None:
        seq = item.seq
        seq.num_computed_tokens += item.num_new_tokens
        if item.completes:
            seq.num_served_tokens = len(seq.token_ids)
        if item.completes and seq.tree is not None:
            if item.tree_nodes:
                seq.verified_tree, seq.num_verified_nodes = seq.tree, item.tree_nodes
                self._unaccepted.append(seq)
            seq.tree = None
        self._hash_final_blocks(seq)
        self.scheduler.states.advance(seq)

    def _move_nodes(self, seq: Sequence, nodes: Ids[int]) -> bool:
        """Move the path's keys and values behind the tokens. Returns False if a fork shares the destination."""
        if not nodes or nodes[-1] == len(nodes) - 1:  # the leading chain, as nodes ascend
            return True
        length = len(seq.token_ids)
        moves = [(node, place) for place, node in enumerate(nodes) if node != place]
        first, last = length + moves[0][1], length + moves[-1][1]
        if self.block_pool.num_blocks_to_write(seq.block_ids, first, last - first + 1):
            return False
        self.runner.copy_slots(
            [self._physical_slot(seq, length + node) for node, _ in moves],
            [self._physical_slot(seq, length + place) for _, place in moves],
        )
        return True

    def _physical_slot(self, seq: Sequence, logical_slot: int) -> int:
        index, offset = divmod(logical_slot, self.block_pool.block_size)
        return seq.block_ids[index] * self.block_pool.block_size + offset

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_pool.block_size)

    def _forget_nodes(self, seq: Sequence) -> None:
        """Forget verified nodes and free blocks behind the computed tokens."""
        seq.verified_tree, seq.num_verified_nodes = None, 0
        self.ahead.trim(seq)

    def _hash_final_blocks(self, seq: Sequence) -> None:
        num_full = min(seq.num_final_tokens, seq.num_computed_tokens) // self.block_pool.block_size
        if num_full > seq.num_hashed_blocks:
            self.block_pool.extend_digests(seq.block_digests, seq.token_ids, seq.cache_salt, num_full)
            for index in range(seq.num_hashed_blocks, num_full):
                self.block_pool.register(seq.block_ids[index], seq.block_digests[index])
            seq.num_hashed_blocks = num_full

    def _check_landed(self) -> None:
        if self._flight is not None:
            raise SequenceStateError("a step is launched and not collected")

    def _check_held(self, seq: Sequence) -> None:
        if not self.scheduler.holds(seq):
            raise SequenceStateError(f"sequence {seq.seq_id} was freed")
