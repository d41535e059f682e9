"""What constraints may take of the steps that others share, counted in their own processor time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.constraints.grammar.awaited import MOST_DEBT_S, KnownConstraint
from specdec.target_service.constraint_costs import ConstraintCosts
from specdec.target_service.session import SessionState

NUM_STEPS = 1000
MOST_SHARE = 0.05


@dataclass
class Grammar:
    """A constraint whose mask takes longer with each token, as an ambiguous one's does."""

    first_s: float
    growth: float
    num_tokens: int = 0

    def take_spent_s(self) -> float:
        self.num_tokens += 1
        return self.first_s * self.growth**self.num_tokens


@dataclass(eq=False)
class Session:
    grammar: Grammar | None
    constraint: KnownConstraint
    state: SessionState = SessionState.DECIDED


class Counted(ConstraintCosts):
    """Sessions that are followed apart are no longer counted."""

    def move(self, session: Any) -> None:
        session.grammar = None


@dataclass
class Attack:
    """Requests of many choices, each with a constraint of its own."""

    num_requests: int
    num_choices: int
    sessions: list[Session] = field(default_factory=list)

    def begin(self, first_s: float, growth: float) -> None:
        for _ in range(self.num_requests):
            constraint = KnownConstraint(SimpleNamespace(debt_s=0.0), {})  # type: ignore[arg-type,typeddict-item]
            self.sessions += [Session(Grammar(first_s, growth), constraint) for _ in range(self.num_choices)]


@pytest.mark.parametrize("step_s", [0.02, 0.1, 1.0])
@pytest.mark.parametrize(("first_s", "growth"), [(0.0004, 1.0), (0.0002, 1.1), (0.03, 1.1)])
def test_steps_with_costly_constraints_last_no_more_than_a_twentieth_longer(
    step_s: float, first_s: float, growth: float
) -> None:
    attack, costs = Attack(num_requests=3, num_choices=16), Counted(None)
    attack.begin(first_s, growth)
    added_s, most_at_once_s = 0.0, 0.0
    for _ in range(NUM_STEPS):
        spent_s = 0.0
        for session in attack.sessions:
            if session.grammar is not None:
                spent_s += session.grammar.first_s * session.grammar.growth ** (session.grammar.num_tokens + 1)
        costs.settle(attack.sessions, step_s, 0.0)  # type: ignore[arg-type]
        added_s += spent_s
        most_at_once_s = max(most_at_once_s, spent_s)
    debts_s = attack.num_requests * MOST_DEBT_S + most_at_once_s  # what may be spent before it is known to be costly
    assert added_s <= MOST_SHARE * NUM_STEPS * step_s + debts_s
