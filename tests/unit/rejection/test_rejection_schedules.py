"""Rejection verification where chains come late, in part or twice: the output follows the target's distribution still.

As in test_rejection_pair.py, the false-alarm rate is 1e-6 and a run is the same every time on one machine.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest

from specdec.drafting.role.growth import GrowthPolicy
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import UNLIMITED, LocalPair, prompts
from tests.support.engine.outcomes import Outcome
from tests.support.engine.rejection import (
    FALSE_ALARM_RATE,
    HOLD_MS,
    TOP_K,
    chi_square_p_value,
    exact_distribution,
    rejection_session,
)

BLOCK = pb.REJECTION_SAMPLE_METHOD_BLOCK
STOP = 14
"""A stop token that is likely in second place."""


def sampled_until_stop(
    pair: LocalPair,
    num_samples: int,
    credit: int = UNLIMITED,
    method: pb.RejectionSampleMethod.ValueType = pb.REJECTION_SAMPLE_METHOD_STANDARD,
    **how: Any,
) -> list[Outcome]:
    """Sessions that end at `STOP`, whose target never waits for the draft."""
    body = {"max_draft_tokens": 4, "credit_position": credit, "rejection_sample_method": method}
    options = {"top_k": TOP_K, "max_tokens": 8, "stop_token_ids": [STOP], "body": body}
    outcomes: list[Outcome] = []
    for first in range(0, num_samples, 64):
        pair.reset()
        opens = {str(s): rejection_session(prompts()[1][:17], seed=s, **options) for s in range(first, first + 64)}
        outcomes += pair.run(opens, hold_off_ms=0.0, **how).values()
    origins = Counter(origin for outcome in outcomes for origin in outcome.origins[1:])
    assert all(origins[kind] > num_samples / 20 for kind in (pb.ORIGIN_DECODE, pb.ORIGIN_DRAFT, pb.ORIGIN_RECOVERED))
    return outcomes


def p_value_until_stop(outcomes: list[Outcome]) -> float:
    """Of the first three tokens, up to `STOP`, being distributed as the target's."""

    def cut(token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids[: token_ids.index(STOP) + 1] if STOP in token_ids else token_ids

    exact: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for token_ids, probability in exact_distribution(prompts()[1][:17], 3).items():
        exact[cut(token_ids)] += probability
    return chi_square_p_value(Counter(cut(tuple(outcome.token_ids[:3])) for outcome in outcomes), exact)


def test_a_chain_that_stop_tokens_are_in_comes_no_sooner_than_others(pair: LocalPair) -> None:
    """The target runs one step for every two of the draft, so that most chains come too late. If a draft ended its
    chain at a stop token, chains with one would be those that arrive, and whether a token is verified would depend on
    what it is: the stop token came second in 58 % of the outputs, in place of 42 %."""
    assert p_value_until_stop(sampled_until_stop(pair, 1024, draft_turns=2)) > FALSE_ALARM_RATE


@pytest.mark.parametrize("method", [pb.REJECTION_SAMPLE_METHOD_STANDARD, BLOCK])
def test_chains_that_are_late_lost_repeated_or_verified_in_part_leave_the_distribution(
    method: pb.RejectionSampleMethod.ValueType, pair: LocalPair
) -> None:
    """All of these may take a chain, or its end, from the target: by the clock, by position, never by its tokens. What
    is left of a chain whose beginning was decoded plainly, and happens to be right, is verified later."""

    def give_credit(pair: LocalPair) -> None:
        for session_id in pair.live:
            position = len(pair.tokens(session_id)) + 3  # two tokens ahead, so that a step verifies one or two
            pair.send_entry(session_id, credit=pb.Credit(position=position))

    outcomes = sampled_until_stop(pair, 1024, 18, method, rng=random.Random(3), draft_turns=12, each_turn=give_credit)
    assert {len(verdict.verified_by_depth) for outcome in outcomes for verdict in outcome.verdicts} == {0, 1, 2}
    assert p_value_until_stop(outcomes) > FALSE_ALARM_RATE


# --- chains that a draft prepares below likely corrections


@pytest.mark.parametrize("method", [pb.REJECTION_SAMPLE_METHOD_STANDARD, pytest.param(BLOCK, marks=pytest.mark.long)])
def test_chains_prepared_below_corrections_leave_the_distribution(
    method: pb.RejectionSampleMethod.ValueType, pair: LocalPair
) -> None:
    """The target never waits, and the draft's answer to a verdict comes one step late: what is verified in the step
    after one that refused a token, or verified none, was mostly prepared."""
    prompt, num_samples = prompts()[1][:17], 768
    options = {"top_k": TOP_K, "max_tokens": 7, "body": {"max_draft_tokens": 3, "rejection_sample_method": method}}
    outcomes: list[Outcome] = []
    for first in range(0, num_samples, 16):
        pair.reset()
        pair.drafter.growth = GrowthPolicy(max_ahead_tokens=8, max_nodes=64, max_heads=48)
        opens = {str(s): rejection_session(prompt, seed=s, **options) for s in range(first, first + 16)}
        outcomes += pair.run(opens, hold_off_ms=0.0, draft_turns=4, late_turns=1).values()
    pairs = [each for outcome in outcomes for each in pairwise(outcome.verdicts)]
    is_prepared = [sum(after.verified_by_depth) > 0 for _, after in pairs]
    is_refused = [pb.ORIGIN_RECOVERED in before.origins for before, _ in pairs]
    assert sum(is_prepared) > 1.5 * num_samples
    assert sum(map(all, zip(is_prepared, is_refused, strict=True))) > num_samples / 64
    counts = Counter(tuple(outcome.token_ids[:4]) for outcome in outcomes)
    assert chi_square_p_value(counts, exact_distribution(prompt, 4)) > FALSE_ALARM_RATE


# --- two drafts that offer different chains for one place


def drawn_chain(start: int, *draws: tuple[int, dict[int, float]]) -> bytes:
    """An encoded proposal of tokens with the distributions that they were drawn from."""
    distributions = [pb.SparseDistribution(token_ids=list(probs), probs=list(probs.values())) for _, probs in draws]
    return pb.Proposal(
        start_position=start, token_ids=[token for token, _ in draws], distributions=distributions
    ).SerializeToString()


def test_a_second_drafts_chain_does_not_decide_whether_the_first_ones_is_verified(pair: LocalPair) -> None:
    """A draft's chain of one is at the target, which waits for more, when another draft takes over and draws another
    token there. Were both kept, as a tree, the first would be verified only where they agree."""
    prompt, num_samples, rng = prompts()[1][:17], 1024, random.Random(8)
    exact = exact_distribution(prompt, 2)
    likely: defaultdict[int, list[int]] = defaultdict(list)
    for first_token, second_token in exact:
        likely[first_token].append(second_token)
    anything = 5, {5: 1.0}
    pending: dict[str, list[bytes]] = {}

    def propose(session_id: str, tokens: list[int]) -> list[bytes]:
        if len(tokens) != len(prompt) + 1:
            return [drawn_chain(len(tokens), anything, anything)]
        if session_id not in pending:
            ids = likely[tokens[-1]]
            one, other = dict.fromkeys(ids, 1 / 3), dict(zip(ids, (0.8, 0.1, 0.1), strict=True))
            drawn = rng.choices(ids, list(one.values()))[0], one
            redrawn = rng.choices(ids, list(other.values()))[0], other
            chains = [[drawn], [redrawn, anything], [drawn, anything]]
            pending[session_id] = [drawn_chain(len(tokens), *draws) for draws in chains]
            return []  # so that the target begins to wait
        return [pending[session_id].pop(0)] if pending[session_id] else []

    outcomes: list[Outcome] = []
    for first in range(0, num_samples, 32):
        pair.reset()
        opens = {}
        for seed in range(first, first + 32):  # forks of one prompt: one step decides the first token of all
            body = {"max_draft_tokens": 2, "fork_from": "" if seed == first else str(first)}
            opens[str(seed)] = rejection_session(prompt, seed=seed, top_k=TOP_K, max_tokens=4, body=body)
        outcomes += pair.run(opens, use_draft=False, propose=propose, hold_off_ms=HOLD_MS).values()
        pending.clear()
    origins = Counter(outcome.origins[1] for outcome in outcomes)
    assert set(origins) == {pb.ORIGIN_DRAFT, pb.ORIGIN_RECOVERED}
    counts = Counter(tuple(outcome.token_ids[:2]) for outcome in outcomes)
    assert chi_square_p_value(counts, exact) > FALSE_ALARM_RATE
