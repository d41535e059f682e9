"""Over a table of sampling parameters, and schedules at random, speculation gives the tokens of plain decoding."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair
from tests.unit.lossless.cases import CASES, FACTORS, pairwise_table
from tests.unit.lossless.sessions import (
    Plainly,
    assert_all_equal,
    assert_equal,
    body_of,
    check_random_schedule,
    examples,
    many_examples,
)


def test_the_table_holds_every_pair_of_values() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        found = [(case[a], case[b]) for case in CASES]
        assert all(pair in found for pair in itertools.product(FACTORS[a], FACTORS[b])), (a, b)


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"temperature={case['temperature']}")
def test_speculation_does_not_change_tokens_logprobs_or_the_end(
    case: dict[str, Any], pair: LocalPair, plainly: Plainly
) -> None:
    body = body_of(case)
    expected = plainly(body)

    outcome = pair.run({"a": body})["a"]

    assert_equal(outcome, expected)
    assert not outcome.rejected
    assert not outcome.draft_errors
    limit = case["max_draft_tokens"]
    assert all(sum(verdict.verified_by_depth) <= (8 if limit is None else limit) for verdict in outcome.verdicts)
    assert len(outcome.logprobs) == (0 if case["num_logprobs"] is None else len(outcome.token_ids))


def test_speculation_is_at_work_in_these_tests(pair: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": t}) for i, t in enumerate((0.0, 0.0, 1.0, 1.0))}
    outcomes = pair.run(opens)
    assert_all_equal(outcomes, opens, plainly)
    assert all(outcome.num_verified > 0 for outcome in outcomes.values())
    assert sum(outcome.num_accepted for outcome in outcomes.values()) >= 10
    assert all(
        outcome.num_accepted == sum(origin == pb.ORIGIN_DRAFT for origin in outcome.origins)
        for outcome in outcomes.values()
    )


def test_origins_tell_how_each_token_came_to_be(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 0, "temperature": 0.0})
    outcome = pair.run({"a": body})["a"]
    plain = plainly(body)
    assert plain.origins == [pb.ORIGIN_PREFILL] + [pb.ORIGIN_DECODE] * (len(plain.token_ids) - 1)
    assert outcome.origins[0] == pb.ORIGIN_PREFILL
    for verdict in outcome.verdicts[1:]:
        *accepted, last = verdict.origins
        assert set(accepted) <= {pb.ORIGIN_DRAFT}
        if not verdict.verified_by_depth:
            assert last == pb.ORIGIN_DECODE
        elif last == pb.ORIGIN_BONUS:
            assert 0 < len(accepted) <= len(verdict.verified_by_depth)
        elif last == pb.ORIGIN_DRAFT:
            assert verdict.finish_reason
        else:
            assert last == pb.ORIGIN_RECOVERED


@pytest.mark.parametrize("first", range(0, len(CASES), 8))
def test_eight_sessions_at_once_do_not_disturb_each_other(first: int, pair: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of(case) for i, case in enumerate(CASES[first : first + 8])}
    assert_all_equal(pair.run(opens, rng=random.Random(first)), opens, plainly)


def test_the_cost_model_may_choose_what_to_verify(pair: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of(case) for i, case in enumerate(CASES[:8])}
    assert_all_equal(pair.run(opens, verify_all=False), opens, plainly)


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=1, max_size=8))
@examples
def test_late_repeated_and_lost_proposals_change_nothing(
    loaded_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    check_random_schedule(loaded_pair, plainly, seed, chosen)


@pytest.mark.long
@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=1, max_size=8))
@many_examples
def test_many_more_schedules_change_nothing(
    loaded_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    check_random_schedule(loaded_pair, plainly, seed, chosen)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_other_tables_hold_too(seed: int, pair: LocalPair, plainly: Plainly) -> None:
    cases = pairwise_table(FACTORS, seed)
    for first in range(0, len(cases), 8):
        pair.reset()
        opens = {str(i): body_of({**case, "seed": seed}) for i, case in enumerate(cases[first : first + 8])}
        assert_all_equal(pair.run(opens, rng=random.Random(seed)), opens, plainly)
