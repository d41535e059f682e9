"""The engine over a model whose keys and values are digests."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from specdec.engine.engine import Engine
from specdec.engine.errors import KVInvariantError, SequenceStateError, SequenceTooLong, TreeError
from specdec.engine.outputs import StepOutput
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree
from tests.support.engine.exact_runner import assert_blocks_add_up, evict_all, fresh_logits, make_engine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def step(engine: Engine) -> StepOutput:
    output = engine.step()
    assert output is not None
    assert_blocks_add_up(engine)
    return output


def prefilled(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> Sequence:
    """A sequence whose prompt is computed and that has one more token pending, as a role would leave it."""
    seq = engine.add(prompt, num_prompt_tokens=len(prompt), **options)
    while engine.step() is not None:
        pass
    engine.append(seq, [7])
    return seq


def assert_next_logits_are_fresh(engine: Engine, seq: Sequence) -> None:
    """The logits after one more token are those of a fresh prefill."""
    engine.append(seq, [8])
    output = step(engine)
    while seq.num_pending_tokens:
        output = step(engine)
    [item] = [item for item in output.items if item.seq is seq]
    assert torch.equal(output.logits[item.rows][-1], fresh_logits(seq.token_ids))


def test_prefill_and_decode_give_the_logits_of_the_last_token() -> None:
    engine, _ = make_engine()
    seq = engine.add(PROMPT, num_prompt_tokens=len(PROMPT))
    output = step(engine)
    assert torch.equal(output.logits, fresh_logits(PROMPT)[None])
    assert output.num_tokens == 9
    [item] = output.items
    assert (item.seq, item.rows, item.start, item.num_new_tokens) == (seq, slice(0, 1), 0, 9)
    assert (item.tree_nodes, item.completes) == (0, True)
    assert engine.step() is None
    assert_next_logits_are_fresh(engine, seq)


def test_prompt_logits_cover_every_token_and_bypass_the_cache() -> None:
    engine, _ = make_engine(max_batch_tokens=4)
    engine.free(prefilled(engine))
    seq = engine.add(PROMPT, num_prompt_tokens=len(PROMPT), prompt_logits=True)
    rows = []
    while (output := engine.step()) is not None:
        rows += list(output.logits)
    assert seq.num_cached_tokens == 0
    expected = [fresh_logits(PROMPT[: end + 1]) for end in range(len(PROMPT))]
    assert torch.equal(torch.stack(rows), torch.stack(expected))


def test_rejecting_first_token_rolls_back_whole_draft() -> None:
    engine, runner = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1, 2, 3, 4, 5, 6])
    output = step(engine)
    assert output.items[0].tree_nodes == 6
    assert len(output.logits) == 7
    blocks_before = len(seq.block_ids)
    engine.accept(seq, [])
    assert len(seq.token_ids) == seq.num_computed_tokens == len(PROMPT) + 1
    assert len(seq.block_ids) < blocks_before
    assert runner.num_slot_copies == 0
    assert_next_logits_are_fresh(engine, seq)


def test_accepting_part_of_a_chain_moves_nothing() -> None:
    engine, runner = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1, 2, 3, 4])
    step(engine)
    engine.accept(seq, [0, 1])
    assert seq.token_ids == [*PROMPT, 7, 1, 2]
    assert seq.num_pending_tokens == 0
    assert runner.num_slot_copies == 0
    assert_next_logits_are_fresh(engine, seq)


def test_accepting_a_branch_compacts_it_into_place() -> None:
    engine, runner = make_engine()
    seq = prefilled(engine)
    tree = TokenTree([1, 2, 3, 4, 5, 6], [-1, -1, 0, 1, 3, 4])
    seq.tree = tree
    output = step(engine)
    for node in range(6):
        path = [tree.token_ids[i] for i in tree.path(node)]
        assert torch.equal(output.logits[node + 1], fresh_logits([*PROMPT, 7, *path]))
    engine.accept(seq, [1, 3, 4, 5])
    assert seq.token_ids == [*PROMPT, 7, 2, 4, 5, 6]
    assert seq.num_pending_tokens == 0
    assert runner.num_slot_copies == 4
    assert_next_logits_are_fresh(engine, seq)


def test_a_node_can_be_accepted_once_and_only_if_it_was_verified() -> None:
    engine, _ = make_engine(max_batch_tokens=10)
    seq = prefilled(engine)
    seq.tree = TokenTree(range(20))
    assert step(engine).items[0].tree_nodes == 9
    with pytest.raises(TreeError):
        engine.accept(seq, list(range(10)))
    with pytest.raises(TreeError):
        engine.accept(seq, [1])
    engine.accept(seq, [0])
    with pytest.raises(SequenceStateError):
        engine.accept(seq, [0])


def test_nodes_that_are_not_accepted_before_the_next_step_are_forgotten() -> None:
    engine, _ = make_engine()
    seq, other = prefilled(engine), prefilled(engine, [1, 2, 3])
    seq.tree = TokenTree([1, 2, 3])
    step(engine)
    engine.append(other, [4])
    step(engine)
    with pytest.raises(SequenceStateError):
        engine.accept(seq, [0])
    assert_next_logits_are_fresh(engine, seq)


def test_a_tree_can_hang_from_a_token_that_is_computed_already() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    step(engine)
    seq.tree = TokenTree([1, 2], [-1, -1])
    output = step(engine)
    assert (output.items[0].num_new_tokens, output.items[0].tree_nodes) == (0, 2)
    assert torch.equal(output.logits[1], fresh_logits([*PROMPT, 7, 2]))
    engine.accept(seq, [1])
    assert_next_logits_are_fresh(engine, seq)


def test_appending_drops_a_tree_that_hung_from_another_token() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1])
    engine.append(seq, [2])
    assert seq.tree is None


def test_rolling_back_frees_blocks_past_the_end_and_keeps_the_rest_valid() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    engine.append(seq, [1, 2, 3, 4, 5, 6])
    step(engine)
    assert len(seq.block_ids) == 4
    engine.rollback(seq, 11)
    assert seq.token_ids == [*PROMPT, 7, 1]
    assert len(seq.block_ids) == 3
    assert_blocks_add_up(engine)
    assert_next_logits_are_fresh(engine, seq)
    stats = engine.stats()
    assert (stats.rollbacks, stats.rollback_tokens) == (1, 5)


def test_a_rollback_to_where_a_chunk_of_the_prefill_ended_still_gives_the_logits_of_the_last_token() -> None:
    engine, _ = make_engine(max_batch_tokens=len(PROMPT))
    seq = engine.add(PROMPT, num_prompt_tokens=len(PROMPT))
    engine.append(seq, [7, 8])
    assert not step(engine).items[0].completes
    engine.rollback(seq, len(PROMPT))
    output = step(engine)
    assert torch.equal(output.logits, fresh_logits(PROMPT)[None])
    assert engine.step() is None
    assert_next_logits_are_fresh(engine, seq)


@pytest.mark.parametrize("num_tokens", [8, 11])
def test_final_tokens_are_never_rolled_back_and_nothing_is_made_up(num_tokens: int) -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    with pytest.raises(SequenceStateError):
        engine.rollback(seq, num_tokens)


def count_opcodes(call: Any, *args: Any) -> int:
    """Bytecode instructions that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*args)
    finally:
        sys.settrace(previous)
    return count


def test_the_cost_of_a_rollback_does_not_depend_on_the_context() -> None:
    costs = set()
    for context in (101, 1001, 10001):
        engine, runner = make_engine(3000, 4, 4096, 8, 12000)
        seq = engine.add(range(context), num_prompt_tokens=context)
        seq.num_computed_tokens = context  # as if prefilled: the model has no part in a rollback
        engine.block_pool.ensure_writable(seq.block_ids, 0, context)
        engine.append(seq, range(10))
        engine.block_pool.ensure_writable(seq.block_ids, context, 10)
        seq.num_computed_tokens += 10
        costs.add(count_opcodes(engine.rollback, seq, context + 1))
        assert (runner.num_slot_copies, runner.num_block_copies, runner.num_forwards) == (0, 0, 0)
    [opcodes] = costs
    assert opcodes > 0


def test_only_full_blocks_of_final_tokens_are_hashed() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    engine.append(seq, [1, 2, 3, 4, 5, 6, 7])
    step(engine)
    hashed = [engine.block_pool._digests[block] is not None for block in seq.block_ids]
    assert hashed == [True, True, False, False, False]
    engine.finalize(seq, 13)
    hashed = [engine.block_pool._digests[block] is not None for block in seq.block_ids]
    assert hashed == [True, True, True, False, False]


@pytest.mark.parametrize("num_tokens", [8, 11])
def test_final_tokens_only_grow_and_exist(num_tokens: int) -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    with pytest.raises(SequenceStateError):
        engine.finalize(seq, num_tokens)


def test_a_second_request_reuses_the_prefix_of_the_first() -> None:
    engine, _ = make_engine()
    engine.free(prefilled(engine))
    seq = engine.add([*PROMPT, 9], num_prompt_tokens=10)
    output = step(engine)
    assert seq.num_cached_tokens == 8
    assert output.num_tokens == 2
    assert torch.equal(output.logits[0], fresh_logits([*PROMPT, 9]))
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (9 + 10, 8)


def test_a_fully_cached_prompt_recomputes_its_last_token_in_a_private_block() -> None:
    engine, _ = make_engine()
    first = prefilled(engine, PROMPT[:8])
    second = engine.add(PROMPT[:8], num_prompt_tokens=8)
    output = step(engine)
    item = output.items[-1]
    assert item.seq is second
    assert (second.num_cached_tokens, item.num_new_tokens) == (4, 4)
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    assert torch.equal(output.logits[item.rows][-1], fresh_logits(PROMPT[:8]))


def test_a_fork_shares_blocks_until_either_writes() -> None:
    engine, runner = make_engine()
    parent = prefilled(engine)
    step(engine)
    used = engine.stats().blocks_used
    child = engine.fork(parent)
    assert engine.stats().blocks_used == used
    assert runner.num_block_copies == 0
    engine.append(parent, [1])
    engine.append(child, [2])
    output = step(engine)
    assert runner.num_block_copies == 1  # the second to write is the only owner by then
    assert torch.equal(output.logits[0], fresh_logits([*PROMPT, 7, 1]))
    assert torch.equal(output.logits[1], fresh_logits([*PROMPT, 7, 2]))
    assert list(parent.block_ids[:2]) == list(child.block_ids[:2])


def test_a_fork_before_the_prompt_is_computed_has_its_own_pending_tokens() -> None:
    engine, _ = make_engine(max_batch_tokens=6)
    parent = engine.add(PROMPT, num_prompt_tokens=len(PROMPT))
    step(engine)
    child = engine.fork(parent)
    engine.append(child, [1])
    assert child.num_pending_tokens == 4
    logits = []
    while (output := engine.step()) is not None:
        logits += [(item.seq, output.logits[item.rows]) for item in output.items if item.completes]
    by_seq = {seq.seq_id: rows[-1] for seq, rows in logits}
    assert torch.equal(by_seq[parent.seq_id], fresh_logits(PROMPT))
    assert torch.equal(by_seq[child.seq_id], fresh_logits([*PROMPT, 1]))


def test_accepting_after_a_fork_leaves_the_child_as_it_was() -> None:
    engine, runner = make_engine()
    parent = prefilled(engine)
    parent.tree = TokenTree([1, 2, 3], [-1, -1, 1])
    step(engine)
    child = engine.fork(parent)
    engine.accept(parent, [1, 2])
    assert parent.token_ids == [*PROMPT, 7, 2, 3]
    # Their place is shared with the child by now, so they are not moved there but computed again.
    assert (runner.num_slot_copies, parent.num_pending_tokens) == (0, 2)
    assert engine.step() is None
    assert_next_logits_are_fresh(engine, child)
    assert_next_logits_are_fresh(engine, parent)


def test_a_fork_that_is_rolled_back_and_continued_differently_is_right() -> None:
    engine, _ = make_engine()
    parent = prefilled(engine)
    engine.append(parent, [1, 2, 3, 4, 5])
    step(engine)
    child = engine.fork(parent)
    engine.rollback(child, 11)
    engine.append(child, [6])
    assert_next_logits_are_fresh(engine, child)
    assert_next_logits_are_fresh(engine, parent)


def test_preemption_keeps_tokens_and_tree_and_loses_no_logits() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1, 2, 3], [-1, -1, 1])
    engine.scheduler.preempt(seq)
    assert_blocks_add_up(engine)
    evict_all(engine.block_pool)
    output = step(engine)
    assert output.items[0].num_new_tokens == 10
    assert torch.equal(output.logits[3], fresh_logits([*PROMPT, 7, 2, 3]))
    assert engine.stats().preemptions == 1


def test_two_sequences_finish_in_a_pool_that_holds_only_one_of_them() -> None:
    engine, _ = make_engine(num_blocks=6)
    seqs = [engine.add([n, *PROMPT], num_prompt_tokens=10) for n in range(2)]
    preempted = 0
    for _ in range(200):
        if all(len(seq.token_ids) == 22 for seq in seqs):
            break
        output = step(engine)
        preempted += len(output.preempted)
        for item in output.items:
            if item.completes:
                assert torch.equal(output.logits[item.rows][-1], fresh_logits(item.seq.token_ids))
                if len(item.seq.token_ids) < 22:
                    engine.append(item.seq, [len(item.seq.token_ids) % 5])
                    engine.finalize(item.seq, len(item.seq.token_ids))
    assert all(len(seq.token_ids) == 22 for seq in seqs)
    assert preempted > 0


def test_a_step_that_fails_in_the_model_advances_nobody() -> None:
    engine, runner = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1])
    forward = runner.forward

    def broken(batch: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        engine.step()
    runner.forward = forward  # type: ignore[method-assign]
    assert seq.num_pending_tokens == 1
    assert seq.tree is not None
    assert torch.equal(step(engine).logits[1], fresh_logits([*PROMPT, 7, 1]))


def test_a_write_to_a_shared_block_is_caught_at_the_write() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    schedule = engine.scheduler.schedule

    def schedule_then_share(*args: Any) -> Any:
        scheduled = schedule(*args)
        engine.block_pool.share(seq.block_ids[-1:])
        return scheduled

    engine.scheduler.schedule = schedule_then_share  # type: ignore[method-assign]
    with pytest.raises(KVInvariantError):
        engine.step()


def test_sequences_that_cannot_run_are_refused_by_type() -> None:
    engine, _ = make_engine(max_model_len=12)
    with pytest.raises(SequenceTooLong):
        engine.add(range(13), num_prompt_tokens=13)
    with pytest.raises(SequenceStateError):
        engine.add([], num_prompt_tokens=0)
    with pytest.raises(SequenceStateError):
        engine.add([1], num_prompt_tokens=2)
    seq = engine.add(range(10), num_prompt_tokens=10)
    with pytest.raises(SequenceTooLong):
        engine.append(seq, [1, 2, 3])
    assert len(seq.token_ids) == 10


def test_freeing_twice_is_refused() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    engine.free(seq)
    assert engine.stats().blocks_used == 0
    with pytest.raises(SequenceStateError):
        engine.free(seq)
    with pytest.raises(SequenceStateError):
        engine.fork(seq)


def test_stats_count_who_holds_blocks_and_who_waits() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    engine.add([1], num_prompt_tokens=1)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert (stats.blocks_used, stats.blocks_total) == (len(seq.block_ids), 32)
