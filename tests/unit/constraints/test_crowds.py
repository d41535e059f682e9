"""More costly constraints than one processor follows: some end, others are told so in bounded time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from google.rpc import code_pb2

from specdec.constraints.grammar import apart
from specdec.constraints.grammar.awaited import AwaitedGrammars
from specdec.constraints.grammar.compiler import Compilation
from specdec.constraints.grammar.figures import GrammarFigures, reason_of
from specdec.constraints.grammar.follower import Following
from specdec.constraints.grammar.source import GrammarSource
from specdec.constraints.limits.faults import MOST_WAIT_S, GrammarError
from specdec.target_service.constraint_costs import ConstraintCosts
from specdec.v1 import common_pb2 as pb

FOLLOWING = Following(
    vocab_size=64, eos_token_ids=[1], after_token_id=None, opening_token_id=None, holds_back_eos=False
)
SOURCE = GrammarSource("constraint.grammar", "start:")
NUM_CROWD, NUM_MASKS = 20, 40


class Costly:
    """A process whose masks take a tenth of a second each, by its own clock."""

    may_start = threading.Event()

    def __init__(self, *_: object) -> None:
        self.may_start.wait()

    def ask(self, question: Any, most_cpu_s: float = 0.0) -> dict[str, Any]:
        return {"spent_s": 0.1, "words": None, "must_end": False}

    def close(self) -> None:
        pass


def test_of_many_costly_sessions_the_oldest_ends_first_once_all_have_had_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apart, "LineProcess", Costly)
    is_done, order = threading.Event(), list[int]()

    class Asking(apart.ApartFollower):
        """Asks for its next mask as soon as one has come."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "mask" and value is not None:
                order.append(self.key)
                if order.count(self.key) < NUM_MASKS:
                    self.commit([5], ())
                elif order.count(1) == order.count(NUM_CROWD) == NUM_MASKS:
                    is_done.set()

    monkeypatch.setattr(apart, "ApartFollower", Asking)
    followers = apart.ApartFollowers({})  # type: ignore[arg-type,typeddict-item]
    crowd = [followers.follow(SOURCE, FOLLOWING) for _ in range(NUM_CROWD)]
    for one in crowd:
        one.commit([], ())
    Costly.may_start.set()
    assert is_done.wait(60)
    num_fair = round(apart._FAIR_CPU_S / 0.1)
    in_turns, in_line = order[: NUM_CROWD * num_fair], order[NUM_CROWD * num_fair :]
    assert [in_turns.count(one.key) for one in crowd] == [num_fair] * NUM_CROWD
    assert in_line == sorted(in_line)


def test_who_has_waited_too_long_for_a_mask_is_told_that_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[apart.ApartFollower] = []
    costs = ConstraintCosts(None)
    for number in range(2):
        follower = apart.ApartFollower(number, SOURCE, FOLLOWING, asked.append)
        session: Any = SimpleNamespace(session_id=str(number), apart=follower, update_pause=lambda: None)
        session.params = SimpleNamespace(min_tokens_ids=(), holds_back=lambda num: False)
        costs._ask(session, follower, [])
    asked[0].asked_s -= MOST_WAIT_S
    costs.poll()
    assert asked[1].mask is None
    assert len(costs) == 1
    assert asked[0].mask is not None and asked[0].mask.fault is not None
    fault = asked[0].mask.fault
    assert (fault.code, fault.reason, fault.field) == (
        code_pb2.RESOURCE_EXHAUSTED, "CONSTRAINT_OVERLOAD", "constraint.grammar",
    )  # fmt: skip


def test_who_has_waited_too_long_for_a_compilation_is_told_that_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults: list[Exception] = []
    compiler: Any = SimpleNamespace(compile=lambda constraint, tenant: Compilation(SOURCE, tenant))
    awaited = AwaitedGrammars[Any](
        compiler, lambda one: (), lambda one: None, lambda one, error: faults.append(error), GrammarFigures()
    )
    body = pb.OpenSession()
    body.sampling.constraint.regex = "a"
    awaited.open(SimpleNamespace(session_id="a"), body)
    awaited.poll()
    assert not faults
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 2 * MOST_WAIT_S)
    awaited.poll()
    assert len(faults) == 1 and not len(awaited)
    assert isinstance(faults[0], GrammarError)
    assert (faults[0].reason, reason_of(faults[0])) == ("CONSTRAINT_OVERLOAD", "busy")
