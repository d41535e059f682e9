"""Sessions of the shipped pair, in this process, and how their tokens are held against those of plain decoding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.outcomes import Outcome
from tests.unit.lossless.cases import CASES

NUM_TOKENS = 28
PROMPT_LENGTHS = (33, 20, 47, 64)
Plainly = Callable[[pb.OpenSession], Outcome]
"""Decodes a session alone, without a draft, and without anything from the prefix cache."""
salts = itertools.count()
"""Under a salt of its own a session finds nothing of another in the prefix cache."""

examples = settings(
    max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
many_examples = settings(examples, max_examples=300, derandomize=False)


def body_of(case: dict[str, Any], **body: Any) -> pb.OpenSession:
    """A session of the table."""
    case = {"max_tokens": NUM_TOKENS, "seed": 11, **case}
    index = case.pop("prompt")
    limit = case.pop("max_draft_tokens", None)
    if limit is not None:
        body = {"max_draft_tokens": limit, **body}
    if case.get("num_logprobs", 0) is None:
        del case["num_logprobs"]
    return open_session(prompts()[index][: PROMPT_LENGTHS[index % 4]], body=body, **case)


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.error is None
    assert outcome.token_ids == expected.token_ids
    assert outcome.finish_reason == expected.finish_reason
    assert outcome.stop_token_id == expected.stop_token_id
    assert outcome.logprobs == expected.logprobs


def assert_all_equal(outcomes: dict[str, Outcome], opens: dict[str, pb.OpenSession], plainly: Plainly) -> None:
    for session_id, body in opens.items():
        assert_equal(outcomes[session_id], plainly(body))


def check_random_schedule(pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]) -> None:
    pair.reset()
    opens = {str(i): body_of(CASES[index % len(CASES)]) for i, index in enumerate(chosen)}
    rng = random.Random(seed)
    outcomes = pair.run(opens, rng=rng, draft_turns=rng.choice((1, 3, 10)), verify_all=rng.random() < 0.8)
    assert_all_equal(outcomes, opens, plainly)
