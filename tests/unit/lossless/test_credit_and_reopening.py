"""A session that is held back, or opened again with what it has, goes on with the same tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import (
    Plainly,
    assert_all_equal,
    assert_equal,
    body_of,
    examples,
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_never_runs_past_its_credit_and_loses_nothing_by_it(
    temperature: float, pair: LocalPair, plainly: Plainly
) -> None:
    rng = random.Random(5)
    opens = {}
    for i in range(4):
        body = body_of({"prompt": i, "temperature": temperature})
        body.credit_position = len(body.token_ids) + 1
        opens[str(i)] = body
    credit = {session_id: body.credit_position for session_id, body in opens.items()}

    def grant(pair: LocalPair) -> None:
        for session_id in sorted(pair.live):
            num_tokens = len(pair.tokens(session_id))
            assert num_tokens <= credit[session_id]
            if num_tokens == credit[session_id] and rng.random() < 0.5:
                credit[session_id] += rng.randrange(1, 6)
                position = credit[session_id]
                pair.send_entry(session_id, credit=pb.Credit(position=position, acknowledged_position=num_tokens))

    assert_all_equal(pair.run(opens, rng=rng, each_turn=grant), opens, plainly)


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=1, max_size=4))
@examples
def test_reopening_with_the_committed_tokens_goes_on_equal(
    loaded_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    loaded_pair.reset()
    rng = random.Random(seed)
    opens = {str(i): body_of(CASES[index % len(CASES)]) for i, index in enumerate(chosen)}

    def reopen(pair: LocalPair) -> None:
        for session_id in sorted(pair.live):
            if pair.num_output(session_id) and rng.random() < 0.1:
                pair.reopen(session_id)

    assert_all_equal(loaded_pair.run(opens, rng=rng, each_turn=reopen), opens, plainly)


def test_the_first_token_after_reopening_is_a_plain_decode(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 1, "temperature": 1.0})
    reopened_at: list[int] = []

    def reopen_once(pair: LocalPair) -> None:
        if not reopened_at and pair.num_output("a") >= 5:
            reopened_at.append(pair.num_output("a"))
            pair.reopen("a")

    outcome = pair.run({"a": body}, each_turn=reopen_once)["a"]
    assert_equal(outcome, plainly(body))
    assert outcome.origins[reopened_at[0]] == pb.ORIGIN_DECODE
