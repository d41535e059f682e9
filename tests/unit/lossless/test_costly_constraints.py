"""A constraint that costs more than its share of steps is followed apart: the same tokens, and others do not wait."""

from __future__ import annotations

import random
import time

import pytest

from specdec.constraints.grammar import apart, awaited
from specdec.target_service import constraint_costs
from specdec.target_service.session import TargetSession
from specdec.v1 import common_pb2 as pb
from tests.support.engine.constrained import TEXTS, constrained, plainly
from tests.support.engine.grammars import EOS
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import fields_of, reason_of
from tests.unit.lossless.sessions import Plainly, assert_equal

AMBIGUOUS = pb.Constraint(grammar='start: s\ns: s s | /[a-z ]/ | ""')
_MOST_WAIT_S = 60.0


def wait_for_masks(pair: LocalPair) -> None:
    """Wait until no session waits for a mask from apart."""
    until_s = time.monotonic() + _MOST_WAIT_S
    while any(s.apart and s.apart.mask is None for s in pair.target_host.sessions):
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("temperature", "mode"),
    [(0.0, pb.VERIFY_MODE_COUPLED), (1.0, pb.VERIFY_MODE_COUPLED), (0.0, pb.VERIFY_MODE_REJECTION)],
)
def test_tokens_are_those_of_a_constraint_followed_by_the_step(
    temperature: float, mode: pb.VerifyMode.ValueType, pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {
        name: constrained(each, temperature=temperature, verify_mode=mode, min_tokens=4) for name, each in TEXTS.items()
    }
    bodies["begun late"] = constrained(
        pb.Constraint(regex="[a-z ]{4,9}", after_token_id=EOS), temperature=temperature, ignore_eos=True
    )
    expected = plainly(pair, bodies)
    moved: set[str] = set()
    rng = random.Random(3)

    def each_turn(pair: LocalPair) -> None:
        wait_for_masks(pair)
        moved.update(session.session_id for session in pair.target_host.sessions if session.apart)
        for session_id in sorted(pair.live & moved):
            if rng.random() < 0.05 and pair.num_output(session_id):
                pair.reopen(session_id)

    monkeypatch.setattr(awaited, "MOST_DEBT_S", -1.0)
    monkeypatch.setattr(constraint_costs, "_LEAST_COSTLY_S", 0.0)
    monkeypatch.setattr(constraint_costs, "_LEAST_BUDGET_S", 1e-9)
    monkeypatch.setattr(constraint_costs, "_SHARE", 1e-9)
    found = pair.run(bodies, each_turn=each_turn)
    for name in bodies:
        assert_equal(found[name], expected[name])
    assert len(moved) >= len(TEXTS)


def test_an_ambiguous_grammar_ends_with_its_own_reason_and_takes_next_to_nothing_of_the_steps(
    pair: LocalPair, plainly: Plainly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "MOST_CPU_S", 0.5)
    spent: list[float] = []
    settle = constraint_costs.ConstraintCosts.settle

    def counted(costs: object, sessions: list[TargetSession], step_s: float, hidden_s: float) -> None:
        for session in sessions:
            if session.grammar is not None:
                spent.append(session.grammar._spent_s)
        settle(costs, sessions, 0.0, hidden_s)  # type: ignore[arg-type]  # a busy machine's long steps have more room

    monkeypatch.setattr(constraint_costs.ConstraintCosts, "settle", counted)
    victim = open_session(prompts()[1][:40], max_tokens=60, ignore_eos=True)
    costly = constrained(AMBIGUOUS, temperature=1.0, ignore_eos=True, max_tokens=4000)
    bodies = {f"costly {choice}": pb.OpenSession() for choice in range(3)}
    for choice, body in enumerate(bodies.values()):
        body.CopyFrom(costly)
        body.sampling.choice = choice
    num_turns = 0

    def each_turn(pair: LocalPair) -> None:
        nonlocal num_turns
        num_turns += 1
        if "victim" not in pair.live:
            wait_for_masks(pair)

    pair.reset()
    found = pair.run({"victim": victim, **bodies}, each_turn=each_turn)
    assert_equal(found["victim"], plainly(victim))
    assert sum(spent) < 0.5, "processor seconds on the step's thread; without a budget each session takes seconds"
    for name in bodies:
        error = found[name].error
        assert error is not None
        assert reason_of(error.status) == "CONSTRAINT_TOO_SLOW"
        assert fields_of(error.status) == ["open.sampling.constraint.grammar"]
        assert "took more than 0.5 s" in error.status.message, "the limit, not what a session had left of it"


def test_a_costly_session_that_is_opened_again_with_its_output_does_not_hold_up_the_step(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "MOST_CPU_S", 2.0)
    body = constrained(AMBIGUOUS, temperature=1.0, ignore_eos=True, max_tokens=45)
    with monkeypatch.context() as unlimited:
        unlimited.setattr(awaited, "MOST_DEBT_S", 1e9)
        expected = plainly(pair, {"costly": body})["costly"]
    reopened: list[int] = []

    def each_turn(pair: LocalPair) -> None:
        wait_for_masks(pair)
        if pair.num_output("costly") >= 40 and not reopened:
            reopened.append(pair.num_output("costly"))
            pair.reopen("costly")

    pair.reset()
    found = pair.run({"costly": body}, each_turn=each_turn)["costly"]
    assert reopened
    assert_equal(found, expected)
