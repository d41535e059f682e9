"""Blocks that sequences share: prefixes, forks, preemption; over a model whose keys and values are digests."""

from typing import Any

import pytest
import torch

from specdec.engine.errors import KVInvariantError
from specdec.engine.tree import TokenTree
from tests.support.engine.engine_steps import PROMPT, assert_next_logits_are_fresh, prefilled, step
from tests.support.engine.exact_runner import assert_blocks_add_up, evict_all, fresh_logits, make_engine


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
