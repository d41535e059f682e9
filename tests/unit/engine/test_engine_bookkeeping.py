"""The engine over a model whose keys and values are digests."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from specdec.engine.errors import SequenceStateError, SequenceTooLong
from specdec.engine.tree import TokenTree
from tests.support.engine.engine_steps import PROMPT, assert_next_logits_are_fresh, prefilled, step
from tests.support.engine.exact_runner import assert_blocks_add_up, fresh_logits, make_engine


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
