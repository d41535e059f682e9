"""Preemption, chunked prefill, cached prefixes and forks change no token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.unit.lossless.sessions import (
    Plainly,
    assert_all_equal,
    assert_equal,
    body_of,
    check_random_schedule,
    examples,
    salts,
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_and_chunked_prefill_change_nothing(
    temperature: float, tight_pair: LocalPair, plainly: Plainly
) -> None:
    tight_pair.reset()
    before = tight_pair.target_built.engine.stats().preemptions
    opens = {
        str(i): body_of({"prompt": i % 4, "temperature": temperature, "seed": i, "num_logprobs": 1}) for i in range(6)
    }
    assert_all_equal(tight_pair.run(opens, rng=random.Random(3)), opens, plainly)
    assert tight_pair.target_built.engine.stats().preemptions > before


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=2, max_size=6))
@settings(examples, max_examples=4)
def test_random_schedules_under_preemption_change_nothing(
    tight_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    check_random_schedule(tight_pair, plainly, seed, chosen)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_from_the_prefix_cache_gives_the_same_tokens(
    temperature: float, pair: LocalPair, plainly: Plainly
) -> None:
    body = body_of({"prompt": 3, "temperature": temperature}, cache_salt=b"%d" % next(salts))
    first, second = (pair.run({"a": body})["a"] for _ in range(2))
    assert_equal(first, plainly(body))
    assert_equal(second, plainly(body))
    assert first.verdicts[0].num_cached_tokens == 0
    assert second.verdicts[0].num_cached_tokens >= 48


def test_another_salt_does_not_share_the_prefix_cache(pair: LocalPair) -> None:
    for salt in (b"one", b"two"):
        outcome = pair.run({"a": body_of({"prompt": 3, "max_tokens": 2}, cache_salt=salt)})["a"]
        assert outcome.verdicts[0].num_cached_tokens == 0


def forks(num_choices: int = 3, salt: bytes = b"") -> dict[str, pb.OpenSession]:
    """Choices of one request, all but the first forked from it."""
    case = {"prompt": 3, "temperature": 1.0, "num_logprobs": 2}
    return {
        str(i): body_of({**case, "choice": i}, cache_salt=salt, **({"fork_from": "0"} if i else {}))
        for i in range(num_choices)
    }


@pytest.mark.parametrize("seed", range(3))
def test_forks_give_what_their_choices_give_alone(seed: int, pair: LocalPair, plainly: Plainly) -> None:
    opens = forks(salt=b"%d" % next(salts))
    before = pair.target_built.engine.stats()
    outcomes = pair.run(opens, rng=random.Random(seed))
    after = pair.target_built.engine.stats()
    assert_all_equal(outcomes, opens, plainly)
    assert len({tuple(outcome.token_ids) for outcome in outcomes.values()}) == 3
    assert all(outcome.origins[0] == pb.ORIGIN_PREFILL for outcome in outcomes.values())
    # One prefill served all three.
    assert after.prefix_query_tokens - before.prefix_query_tokens == len(opens["0"].token_ids)


def test_forks_survive_preemption(tight_pair: LocalPair, plainly: Plainly) -> None:
    tight_pair.reset()
    opens = forks(5)
    before = tight_pair.target_built.engine.stats().preemptions
    assert_all_equal(tight_pair.run(opens, rng=random.Random(0)), opens, plainly)
    assert tight_pair.target_built.engine.stats().preemptions > before


def test_forks_of_a_session_that_is_closed_in_prefill_start_on_their_own(
    tight_pair: LocalPair, plainly: Plainly
) -> None:
    tight_pair.reset()
    opens = forks(salt=b"%d" % next(salts))

    def close_parent(pair: LocalPair) -> None:
        if "0" in pair.live and len(pair.target_host.sessions) == 3:
            pair.send_entry("0", close=pb.CloseSession(reason="cancelled"))
            pair.live.discard("0")

    outcomes = tight_pair.run(opens, use_draft=False, each_turn=close_parent)
    assert outcomes["0"].token_ids == []
    for session_id in ("1", "2"):
        assert_equal(outcomes[session_id], plainly(opens[session_id]))


def test_a_session_that_fills_the_whole_cache_ends_by_length() -> None:
    small = LocalPair(num_blocks=4)
    body = open_session(prompts()[0][:50], max_tokens=100, ignore_eos=True)
    outcome = small.run({"a": body})["a"]
    assert outcome.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(outcome.token_ids) == 4 * 16 - 50
