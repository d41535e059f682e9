"""Whole deployments, at random: coordinators, targets, drafts, clients and a store, all of which break."""

from __future__ import annotations

import pytest

from tests.protocol.runs.report import explain
from tests.protocol.runs.run import run
from tests.protocol.runs.schedule import Action, Schedule, draw
from tests.protocol.runs.shrink import shrink

_NUM_SHORT = 24
_NUM_LONG = 3000


@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(_NUM_SHORT))
def test_tokens_are_the_references_with_one_owner_and_an_end_whatever_breaks(seed: int) -> None:
    schedule = draw(seed)
    outcome = run(schedule)
    assert not outcome.violations, explain(schedule, outcome, most_tries=30)
    assert outcome.num_requests >= 2
    assert outcome.num_tokens > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_deployments_keep_to_the_protocol() -> None:
    num_tokens = 0
    for seed in range(_NUM_SHORT, _NUM_SHORT + _NUM_LONG):
        schedule = draw(seed)
        outcome = run(schedule)
        assert not outcome.violations, explain(schedule, outcome, most_tries=200)
        num_tokens += outcome.num_tokens
    assert num_tokens > 10 * _NUM_LONG


def test_equal_schedules_make_equal_runs() -> None:
    schedule = draw(15)
    assert run(schedule) == run(Schedule.parse(str(schedule)))


def test_shrinking_leaves_what_a_violation_needs() -> None:
    schedule = draw(3)
    needed = {schedule.actions[2], schedule.actions[-1]}

    def is_bad(shorter: Schedule) -> bool:
        return needed <= set(shorter.actions)

    assert set(shrink(schedule, is_bad).actions) == needed


def test_an_unknown_action_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="unknown action"):
        Action.parse("0.1:explode:1,2,3,4")
