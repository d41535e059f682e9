"""Who runs, and who gives up blocks."""

import itertools
import subprocess
import sys

import pytest

from specdec.engine.block_pool import BlockPool
from specdec.engine.errors import SequenceTooLong
from specdec.engine.scheduler import ScheduledStep, Scheduler
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree

BLOCK_SIZE = 4


def a_sequence(seq_id: int, token_ids: list[int], num_prompt_tokens: int, *, priority: int = 0) -> Sequence:
    """One whose prompt is all that is final."""
    return Sequence(
        seq_id=seq_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        num_final_tokens=num_prompt_tokens,
        priority=priority,
        arrival=seq_id,
    )


class World:
    """A scheduler and the least that an engine does around it."""

    def __init__(self, num_blocks: int = 32, max_tokens: int = 16, max_seqs: int = 8, max_len: int = 64) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, max_tokens, max_seqs, max_len)
        self._ids = itertools.count()

    def add(self, num_tokens: int, *, priority: int = 0, first_token: int = 0) -> Sequence:
        seq_id = next(self._ids)
        tokens = [first_token + 100 * seq_id + i for i in range(num_tokens)]
        seq = a_sequence(seq_id, tokens, num_tokens, priority=priority)
        self.scheduler.add(seq)
        return seq

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        for item in step.items:
            item.seq.num_computed_tokens += item.num_new_tokens
            if item.completes:
                item.seq.num_served_tokens = len(item.seq.token_ids)
                item.seq.tree = None
        return step

    def settle(self) -> None:
        while self.step().items:
            pass


def shares(step: ScheduledStep) -> list[tuple[int, int, int]]:
    """(sequence, new tokens, tree nodes) of each item."""
    return [(item.seq.seq_id, item.num_new_tokens, item.num_tree_nodes) for item in step.items]


def test_bookkeeping_imports_neither_torch_nor_transformers() -> None:
    modules = ", ".join(f"specdec.engine.{m}" for m in ("sequence", "tree", "block_pool", "scheduler", "errors"))
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def test_nothing_to_do_is_an_empty_step() -> None:
    world = World()
    assert not world.step().items
    world.add(3)
    assert world.step().items
    assert not world.step().items


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    world = World(max_tokens=16)
    seq = world.add(40)
    chunks = [world.step().items[0] for _ in range(3)]
    assert [(c.start, c.num_new_tokens, c.completes) for c in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
    ]
    assert len(seq.block_ids) == 10


def test_decodes_come_before_prefills_and_prefills_by_arrival() -> None:
    world = World(max_tokens=16)
    decode = world.add(5)
    world.settle()
    first, second = world.add(10), world.add(10)
    decode.token_ids.append(7)
    assert shares(world.step()) == [(decode.seq_id, 1, 0), (first.seq_id, 10, 0), (second.seq_id, 5, 0)]


def test_a_better_priority_prefills_first_but_takes_no_decode_tokens() -> None:
    world = World(max_tokens=8)
    decode, late = world.add(4, priority=1), world.add(20, priority=1)
    world.step()
    urgent = world.add(20, priority=0)
    decode.token_ids.append(7)
    assert shares(world.step()) == [(urgent.seq_id, 7, 0), (decode.seq_id, 1, 0)]
    assert late.num_computed_tokens == 4


def test_a_few_pending_tokens_count_as_a_decode() -> None:
    world = World(max_tokens=8)
    seq = world.add(4)
    world.settle()
    world.add(20)
    seq.token_ids += [1, 2, 3]
    assert shares(world.step()) == [(0, 3, 0), (1, 5, 0)]


def test_sequences_of_a_step_are_bounded_and_decodes_take_turns() -> None:
    world = World(max_seqs=2)
    seqs = [world.add(2) for _ in range(3)]
    world.settle()
    served = []
    for _ in range(3):
        for seq in seqs:
            if seq.num_pending_tokens == 0:
                seq.token_ids.append(1)
        served += [seq_id for seq_id, _, _ in shares(world.step())]
    assert sorted(served) == [0, 0, 1, 1, 2, 2]


def test_a_paused_sequence_is_not_scheduled() -> None:
    world = World()
    seq = world.add(3)
    seq.paused = True
    assert not world.step().items
    seq.paused = False
    assert world.step().items


def test_a_tree_waits_for_the_last_pending_token() -> None:
    world = World(max_tokens=8)
    seq = world.add(12)
    seq.tree = TokenTree([1, 2])
    assert shares(world.step()) == [(0, 8, 0)]
    assert seq.tree is not None
    assert shares(world.step()) == [(0, 4, 2)]


def test_a_tree_waits_even_when_rows_are_left_over() -> None:
    world = World(max_len=24)
    decode = world.add(23)
    world.settle()
    decode.token_ids.append(1)
    decode.tree = TokenTree(range(20))  # rows are set aside for it, but the context has no room
    prefill = world.add(20)
    prefill.tree = TokenTree([1])
    assert shares(world.step()) == [(decode.seq_id, 1, 0), (prefill.seq_id, 8, 0)]


def test_a_tree_below_a_computed_token_needs_no_new_token() -> None:
    world = World()
    seq = world.add(4)
    world.settle()
    seq.tree = TokenTree([1, 2])
    assert shares(world.step()) == [(0, 0, 2)]


def test_trees_leave_half_of_what_is_left_to_a_waiting_prefill() -> None:
    world = World(max_tokens=17)
    decode = world.add(4)
    world.settle()
    decode.token_ids.append(1)
    decode.tree = TokenTree(range(20))
    world.add(40)
    assert shares(world.step()) == [(0, 1, 8), (1, 8, 0)]


def test_what_the_prefill_does_not_need_goes_to_the_trees() -> None:
    world = World(max_tokens=16)
    decode = world.add(4)
    world.settle()
    decode.token_ids.append(1)
    decode.tree = TokenTree(range(20))
    world.add(3)
    assert shares(world.step()) == [(0, 1, 12), (1, 3, 0)]


def test_a_tree_is_cut_to_the_free_blocks_and_never_preempts() -> None:
    world = World(num_blocks=4)
    seq, other = world.add(6), world.add(4)
    world.settle()
    seq.token_ids.append(1)
    seq.tree = TokenTree(range(10))
    # One slot is left in its second block, and one block is free.
    step = world.step()
    assert shares(step) == [(0, 1, 5)]
    assert not step.preempted
    assert other.block_ids


def test_a_tree_is_cut_to_the_context() -> None:
    world = World(max_len=10)
    seq = world.add(7)
    seq.tree = TokenTree(range(10))
    assert shares(world.step()) == [(0, 7, 3)]


def test_a_tree_without_any_free_slot_is_kept_for_later() -> None:
    world = World(num_blocks=1)
    seq = world.add(4)
    world.settle()
    seq.tree = TokenTree([1])
    assert not world.step().items
    assert seq.tree is not None


def test_the_latest_of_the_lowest_priority_is_preempted_and_keeps_tokens_and_tree() -> None:
    world = World(num_blocks=4)
    first, low, low_later = world.add(8), world.add(4, priority=1), world.add(4, priority=1)
    world.settle()
    for seq in (first, low, low_later):
        seq.token_ids.append(1)
    low_later.tree = TokenTree([5])
    step = world.step()
    assert step.preempted == [low_later]
    assert [seq_id for seq_id, _, _ in shares(step)] == [0]
    assert (low_later.num_computed_tokens, len(low_later.block_ids)) == (0, 0)
    assert len(low_later.token_ids) == 5
    assert low_later.tree is not None
    assert world.scheduler.counters.preemptions == 1


def test_paused_sequences_are_preempted_before_worse_priorities() -> None:
    world = World(num_blocks=3)
    needy, low, paused = world.add(4), world.add(4, priority=9), world.add(4)
    world.settle()
    paused.paused = True
    needy.token_ids.append(1)
    assert world.step().preempted == [paused]
    assert low.block_ids


def test_a_worse_sequence_waits_instead_of_preempting_a_better_one() -> None:
    world = World(num_blocks=3)
    better, worse = world.add(7), world.add(4)
    world.settle()
    better.token_ids.append(1)
    worse.token_ids.append(1)
    step = world.step()
    assert shares(step) == [(better.seq_id, 1, 0)]
    assert not step.preempted
    assert worse.num_computed_tokens == 4


def test_an_idle_sequence_gives_way_when_nothing_else_could_run() -> None:
    world = World(num_blocks=2)
    idle, blocked = world.add(4), world.add(4)
    world.settle()
    blocked.token_ids.append(1)
    step = world.step()
    assert step.preempted == [idle]
    assert shares(step) == [(blocked.seq_id, 1, 0)]


def test_an_idle_sequence_does_not_run_again_after_preemption() -> None:
    world = World()
    seq = world.add(6)
    world.settle()
    world.scheduler.preempt(seq)
    assert not world.step().items
    seq.token_ids.append(1)
    assert shares(world.step()) == [(0, 7, 0)]


def test_a_waiting_prompt_starts_only_when_all_of_it_fits() -> None:
    world = World(num_blocks=4, max_tokens=8)
    holder = world.add(8)
    world.settle()
    waiting = world.add(12)
    holder.token_ids.append(1)
    assert shares(world.step()) == [(holder.seq_id, 1, 0)]
    assert not waiting.block_ids


def test_a_prompt_that_does_not_fit_yet_holds_no_cached_blocks_either() -> None:
    world = World(num_blocks=6)
    prompt = world.add(8)
    world.settle()
    digests: list[bytes] = []
    world.pool.extend_digests(digests, prompt.token_ids, b"", 2)
    for block, digest in zip(prompt.block_ids, digests, strict=True):
        world.pool.register(block, digest)
    waiting = a_sequence(99, prompt.token_ids + [1] * 16, 24)
    holder = world.add(4)
    world.settle()
    world.scheduler.add(waiting)
    holder.token_ids.append(1)
    assert shares(world.step()) == [(holder.seq_id, 1, 0)]
    assert not waiting.block_ids
    world.scheduler.remove(holder)
    world.scheduler.remove(prompt)
    assert shares(world.step()) == [(99, 16, 0)]
    assert waiting.num_cached_tokens == 8


def test_nobody_overtakes_a_prompt_that_waits_for_blocks() -> None:
    world = World(num_blocks=4)
    holder = world.add(8)
    world.settle()
    world.add(12)
    world.add(4)
    holder.token_ids.append(1)
    assert shares(world.step()) == [(holder.seq_id, 1, 0)]


@pytest.mark.parametrize(("num_blocks", "max_len", "limit"), [(32, 10, "context"), (2, 64, "KV cache")])
def test_a_sequence_that_could_never_run_is_refused(num_blocks: int, max_len: int, limit: str) -> None:
    world = World(num_blocks=num_blocks, max_len=max_len)
    with pytest.raises(SequenceTooLong) as caught:
        world.add(11)
    assert caught.value.limit == limit
    assert len(world.scheduler) == 0


def test_a_sequence_as_long_as_the_pool_runs() -> None:
    world = World(num_blocks=4)
    world.add(16)
    assert shares(world.step()) == [(0, 16, 0)]


def test_removing_a_sequence_frees_its_blocks() -> None:
    world = World()
    seq = world.add(9)
    world.settle()
    world.scheduler.remove(seq)
    assert world.pool.stats().used == 0
    assert not world.scheduler.holds(seq)
