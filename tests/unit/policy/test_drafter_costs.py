"""What it costs to ask a drafter, its own rows in the target's step included, decides how often it is asked."""

from __future__ import annotations

import random

import pytest

from specdec.config.drafter_options import LookaheadOptions
from specdec.drafting.interface import Context
from specdec.drafting.lookup.lookahead import Lookahead
from specdec.target_service.policy.budget import TRIAL_STEPS
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.proposals.session_drafters import DrafterInSession
from specdec.target_service.proposals.window import row_tokens, window_rows
from specdec.target_service.tree.speculation_tree import SpeculationTree

STEPS = 4000


def part() -> DrafterInSession:
    context = Context([1, 2, 3], 3)
    return DrafterInSession("lookahead", Lookahead(LookaheadOptions()).open(context))


def share_asked(cost_tokens: float, *, hit: float, credit: float = 1.0) -> float:
    """Of steps, for a drafter each of whose calls brings so many tokens at some odds."""
    rng, asked = random.Random(3), part()
    num_asked = 0
    for _ in range(STEPS):
        if asked.is_due():
            num_asked += 1
            asked.judge(credit if rng.random() < hit else 0.0, cost_tokens)
    return num_asked / STEPS


def test_who_pays_is_asked_at_every_step_however_dear() -> None:
    assert share_asked(0.0, hit=0.0) == 1.0
    assert share_asked(0.2, hit=0.9) > 0.9
    assert share_asked(0.9, hit=0.9, credit=2.0) > 0.8


def test_dear_calls_that_bring_less_than_they_cost_become_rare_though_a_token_is_accepted_now_and_then() -> None:
    assert share_asked(1.5, hit=0.3) < 0.03  # no call ever brings what it costs
    assert share_asked(1.5, hit=0.1, credit=2.0) < 0.1


@pytest.mark.parametrize(("cost_tokens", "calls"), [(0.1, TRIAL_STEPS), (0.4, TRIAL_STEPS), (1.0, 9), (1.5, 6)])
def test_the_dearer_calls_are_the_sooner_they_are_judged(cost_tokens: float, calls: int) -> None:
    asked = part()
    while asked.interval == 1:
        asked.judge(0.0, cost_tokens)
    assert asked.num_calls == calls


def test_cheap_calls_begin_again_with_the_first_token_that_is_accepted() -> None:
    asked = part()
    while asked.interval < 64:
        asked.wait = 0
        asked.judge(0.0, 0.05)
    asked.judge(0.5, 0.05)
    assert (asked.interval, asked.wait) == (1, 0)


def test_rows_cost_what_the_step_is_longer_by_for_all_of_its_sessions() -> None:
    step_time = StepTimeModel(base_s=0.010, row_s=0.001)
    alone = row_tokens(29, 28, 1, step_time)
    assert alone == pytest.approx(0.001 / 0.011)
    assert row_tokens(8 + 8 * 28, 8 * 28, 8, step_time) == pytest.approx(0.001 * 8 / 0.018)
    assert row_tokens(29, 0, 1, step_time) == 0.0


def test_rows_in_the_padding_of_a_step_are_free_and_those_that_need_more_of_it_share_that() -> None:
    step_time = StepTimeModel(base_s=0.010, row_s=0.001, edges=(8, 32, 64))
    assert row_tokens(32, 20, 1, step_time) == 0.0
    assert row_tokens(32, 24, 1, step_time) == pytest.approx((0.042 - 0.018) / 24 / 0.018)


def test_rows_that_are_there_for_a_window_alone_are_told_from_guesses_and_from_what_others_propose() -> None:
    tree = SpeculationTree(vocab_size=100)
    tree.hang("ngram", [5], [-1], [0.5])
    # A guess 6, and a window of 5, which ngram has as well, 7 and 8.
    tree.hang("lookahead", [6, 5, 7, 8], [-1, -1, 1, 2], [0.5, 0.0, 0.0, 0.0], 1)
    assert window_rows(tree, range(4)) == {"lookahead": 2}
    assert window_rows(tree, [0, 1]) == {}
    assert window_rows(tree, []) == {}
