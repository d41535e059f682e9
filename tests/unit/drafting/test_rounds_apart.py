"""Draft and target at work at the same time: which steps find a proposal, and how many tokens they commit.

The shipped pair, without clocks: the draft has some steps for each step of the target, and its answer to a verdict
comes one step of the target late.
"""

from __future__ import annotations

import pytest

from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.outcomes import Outcome

COUPLED, REJECTION = pb.VERIFY_MODE_COUPLED, pb.VERIFY_MODE_REJECTION


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair()


def decoded(
    pair: LocalPair, mode: pb.VerifyMode.ValueType, temperature: float, draft_turns: int, max_tokens: int = 64
) -> list[Outcome]:
    """Outcomes of requests that run one at a time."""
    outcomes: list[Outcome] = []
    for number in range(4):
        pair.reset()
        body = open_session(
            prompts()[number][:60],
            verify_mode=mode,
            temperature=temperature,
            seed=number,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        ran = pair.run({"s": body}, draft_turns=draft_turns, late_turns=1, hold_off_ms=0.0)
        outcomes.append(ran["s"])
    return outcomes


def figures(outcomes: list[Outcome]) -> tuple[float, float]:
    """Share of the steps after the prompt's that verify a proposal, and tokens per such step."""
    steps = [verdict for outcome in outcomes for verdict in outcome.verdicts[1:]]
    num_verifying = sum(sum(verdict.verified_by_depth) > 0 for verdict in steps)
    return num_verifying / len(steps), sum(len(verdict.token_ids) for verdict in steps) / len(steps)


@pytest.mark.parametrize(
    ("temperature", "draft_turns", "least_share", "least_tokens"),
    [(0.7, 4, 0.5, 1.9), (0.7, 8, 0.5, 2.7), (1.0, 4, 0.25, 1.35), (1.0, 8, 0.3, 1.6)],
)
def test_steps_in_rejection_mode_find_what_was_prepared_for_their_verdict(
    pair: LocalPair, temperature: float, draft_turns: int, least_share: float, least_tokens: float
) -> None:
    """With whole chains alone, and none of them prepared, shares were 0.12, 0.38, 0.06 and 0.25."""
    share, tokens = figures(decoded(pair, REJECTION, temperature, draft_turns))
    assert share > least_share
    assert tokens > least_tokens


@pytest.mark.parametrize(("mode", "temperature"), [(COUPLED, 0.0), (COUPLED, 0.7), (REJECTION, 0.7)])
def test_the_first_chain_comes_with_the_prompt_so_that_short_answers_are_verified_from_the_start(
    pair: LocalPair, mode: pb.VerifyMode.ValueType, temperature: float
) -> None:
    outcomes = decoded(pair, mode, temperature, draft_turns=8, max_tokens=16)
    early = [any(sum(step.verified_by_depth) > 0 for step in outcome.verdicts[1:3]) for outcome in outcomes]
    assert sum(early) >= len(early) - 1, "the third token"
    assert figures(outcomes)[1] > 2
