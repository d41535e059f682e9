"""What asking one more source brings beyond what others have proposed, and who is asked first by it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdec.drafting.interface import Room
from specdec.target_service.pacing.expectations import Expectations
from specdec.target_service.policy.marginal_gains import DrafterCall, Headroom, MarginalGains
from specdec.target_service.proposals.ask_order import AskOrder
from specdec.target_service.proposals.session_drafters import DrafterInSession
from specdec.wire.sampling_params import VerifyMode

LIMIT = 7


def a_session(*, tree: int = 1, mode: VerifyMode = VerifyMode.COUPLED, num_walks: int = 1) -> Any:
    """As much of one as is looked at."""
    return SimpleNamespace(tree=[0] * tree, mode=mode, num_walks=num_walks)


def expectations(tokens_per_s: float) -> Expectations:
    made = Expectations()
    made.tokens_per_s = tokens_per_s
    return made


def parts(*names: str) -> list[DrafterInSession]:
    return [DrafterInSession(name, cast("Any", None)) for name in names]


def test_a_share_is_learnt_apart_for_what_sure_sources_leave() -> None:
    """Where nobody knows anything it finds most of the tokens; where others are nearly sure it is wrong with them."""
    rng, gains = random.Random(1), MarginalGains()
    for _ in range(400):
        gains.observe(
            DrafterCall("draft", Headroom(LIMIT, LIMIT), range(LIMIT)), {n for n in range(LIMIT) if rng.random() < 0.8}
        )
        gains.observe(
            DrafterCall("draft", Headroom(1.0, LIMIT), range(1)), {n for n in range(1) if rng.random() < 0.05}
        )
    assert gains.expected("draft", Headroom(LIMIT, LIMIT)) == pytest.approx(0.8 * LIMIT, rel=0.1)
    assert gains.expected("draft", Headroom(1.0, LIMIT)) < 0.15
    assert gains.expected("another", Headroom(4.0, LIMIT)) == pytest.approx(2.0), "nothing is known of it"


def test_nodes_that_others_proposed_first_are_no_gain() -> None:
    gains = MarginalGains()
    for _ in range(200):
        gains.observe(DrafterCall("late", Headroom(3.5, LIMIT), range(5, 5)), {0, 1, 2})
        gains.observe(DrafterCall("first", Headroom(3.5, LIMIT), range(3)), {0, 1, 2})
    assert gains.expected("late", Headroom(3.5, LIMIT)) < 0.1
    assert gains.expected("first", Headroom(3.5, LIMIT)) > 2.5


def test_nothing_left_is_nothing_gained_and_a_step_without_room_divides_by_nothing() -> None:
    gains = MarginalGains()
    assert gains.expected("ngram", Headroom(0.0, LIMIT)) == 0
    assert gains.expected("ngram", Headroom(0.0, 0)) == 0


def test_one_more_source_is_asked_only_for_more_than_is_decoded_meanwhile() -> None:
    known = expectations(tokens_per_s=500.0)
    for _ in range(300):
        known.marginal.observe(DrafterCall("draft", Headroom(2.0, LIMIT), range(2)), {0})
    asks = [(a_session(), Headroom(2.0, LIMIT))]  # a token to be gained
    assert known.is_worth_asking("draft", asks, 0.0015)
    assert not known.is_worth_asking("draft", asks, 0.0025)
    assert known.is_worth_asking("draft", 3 * asks, 0.0025), "one call for three sessions gains three"


@pytest.mark.parametrize("session", [a_session(tree=0), a_session(mode=VerifyMode.REJECTION), a_session(num_walks=16)])
def test_the_first_one_and_all_in_rejection_mode_and_now_and_then_everybody_is_asked(session: Any) -> None:
    known = expectations(tokens_per_s=1e9)
    assert known.is_worth_asking("draft", [(session, Headroom(1.0, LIMIT))], 1.0)
    assert not known.is_worth_asking("draft", [(a_session(), Headroom(1.0, LIMIT))], 1.0)


def test_who_gains_most_by_the_second_is_asked_first_except_in_rejection_mode() -> None:
    known, turns = expectations(tokens_per_s=100.0), AskOrder()
    for name, cost_s, gain in (("dear", 1e-3, 3), ("cheap", 1e-5, 1), ("vain", 1e-5, 0)):
        turns.observe(name, cost_s)
        for _ in range(300):
            known.marginal.observe(DrafterCall(name, Headroom(LIMIT, LIMIT), range(gain)), set(range(gain)))
    order = turns.order(parts("dear", "vain", "cheap"), Room(LIMIT, LIMIT), known)
    assert [part.name for part in order] == ["cheap", "dear", "vain"]
    chain = turns.order(parts("dear", "vain", "cheap"), Room(LIMIT, LIMIT, is_chain=True), known)
    assert [part.name for part in chain] == ["dear", "vain", "cheap"]


def test_a_turn_comes_once_a_step_and_that_of_who_gains_less_after_the_draft() -> None:
    known, turns, session, asked = Expectations(), AskOrder(), a_session(tree=0), set[str]()
    session.max_nodes, session.num_tokens = LIMIT, 3
    session.end = SimpleNamespace(max_depth=lambda num_tokens: LIMIT)
    turns.observe("slow", 1.0)
    room = Room(LIMIT, LIMIT)
    assert turns.take("slow", session, asked, room, known, 100.0) is None
    assert turns.take("slow", session, asked, room, known, 0.0) == Headroom(LIMIT, LIMIT)
    assert turns.take("slow", session, asked, room, known, 0.0) is None
