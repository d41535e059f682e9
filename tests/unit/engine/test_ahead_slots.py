"""Slots computed before their tokens are appended: whose they are, and when they are given back."""

from __future__ import annotations

import pytest

from specdec.engine.engine import Engine
from specdec.engine.errors import SequenceStateError
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree
from tests.support.engine.engine_steps import prefilled, step
from tests.support.engine.exact_runner import assert_blocks_add_up, make_engine

DRAWN = [1, 2, 3]


def served(engine: Engine, first_token: int = 0) -> Sequence:
    """A sequence of 12 tokens, three whole blocks, with nothing pending."""
    seq = prefilled(engine, list(range(first_token, first_token + 11)))
    step(engine)
    assert len(seq.token_ids) == 12
    assert not seq.num_pending_tokens
    return seq


def test_slots_past_the_tokens_get_blocks_that_a_release_gives_back() -> None:
    engine, _ = make_engine()
    seq = served(engine)
    assert engine.ahead.reserve(seq, 5) == 5
    assert len(seq.block_ids) == 5
    engine.ahead.release()
    assert len(seq.block_ids) == 3
    assert_blocks_add_up(engine)


def test_only_free_blocks_are_taken() -> None:
    engine, _ = make_engine(num_blocks=7)
    seq, other = served(engine), served(engine, 20)
    assert engine.ahead.reserve(seq, 9) == 4
    assert engine.ahead.reserve(other, 9) == 0
    assert engine.stats().preemptions == 0
    assert_blocks_add_up(engine)


def test_a_step_forgets_what_was_not_taken() -> None:
    engine, _ = make_engine()
    seq = served(engine)
    engine.ahead.reserve(seq, 3)
    engine.ahead.hold(seq, DRAWN)
    engine.append(seq, DRAWN[:1])
    assert engine.ahead.is_known(seq)
    step(engine)
    engine.append(seq, DRAWN[:1])
    assert not engine.ahead.is_known(seq)


def test_a_preempted_sequence_knows_nothing_of_what_was_drawn() -> None:
    engine, _ = make_engine()
    seq = served(engine)
    engine.ahead.reserve(seq, 3)
    engine.ahead.hold(seq, DRAWN)
    engine.scheduler.preempt(seq)
    engine.append(seq, DRAWN[:1])
    assert not engine.ahead.is_known(seq)
    with pytest.raises(SequenceStateError):
        engine.ahead.take(seq)


def test_what_follows_another_token_is_not_known() -> None:
    engine, _ = make_engine()
    seq = served(engine)
    engine.ahead.reserve(seq, 3)
    engine.ahead.hold(seq, DRAWN)
    engine.append(seq, DRAWN[:1])
    engine.ahead.take(seq)
    engine.append(seq, [9])
    assert not engine.ahead.is_known(seq)
    engine.append(seq, DRAWN[1:2])
    assert not engine.ahead.is_known(seq)


def test_pending_tokens_come_first() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    with pytest.raises(SequenceStateError):
        engine.ahead.reserve(seq, 1)


def test_nodes_that_may_be_accepted_keep_their_slots() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([4, 5])
    step(engine)
    assert engine.ahead.reserve(seq, 2) == 0
    engine.accept(seq, [0, 1])


def test_a_shared_block_is_left_to_a_step() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    step(engine)
    assert len(seq.token_ids) % engine.block_pool.block_size
    engine.fork(seq)
    assert engine.ahead.reserve(seq, 2) == 0


def test_borrowed_slots_begin_with_what_is_pending_and_go_back_before_the_next_step() -> None:
    engine, _ = make_engine(num_blocks=7)
    seq = served(engine)
    engine.append(seq, [7])
    assert engine.ahead.borrow(seq, 6) == 6
    assert len(seq.block_ids) == 5
    step(engine)
    assert len(seq.block_ids) == 4
    assert seq.num_computed_tokens == 13
    assert_blocks_add_up(engine)


def test_nothing_is_borrowed_in_a_block_that_another_sequence_shares() -> None:
    engine, _ = make_engine()
    seq = served(engine)
    engine.append(seq, [7])
    step(engine)
    other = engine.fork(seq)
    engine.append(other, [8])
    assert engine.ahead.borrow(other, 2) == 0
