"""Whole deployments, at random: coordinators, targets, drafts, clients and a store, all of which break."""

from __future__ import annotations

import pytest

from tests.protocol.runs.link_run import LINK_FAULTS, run_link
from tests.protocol.runs.report import explain
from tests.protocol.runs.run import run
from tests.protocol.runs.schedule import Action, Schedule, draw
from tests.protocol.runs.shrink import shrink

_NUM_SHORT = 24
_NUM_LONG = 3000
_NUM_LINKS = 24


@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(_NUM_SHORT))
def test_tokens_are_the_references_with_one_owner_and_an_end_whatever_breaks(seed: int) -> None:
    schedule = draw(seed)
    outcome = run(schedule)
    assert not outcome.violations, explain(schedule, outcome, most_tries=30)
    assert outcome.num_requests >= 2
    assert outcome.num_tokens > 0
    assert not outcome.num_linked or schedule.shape.options.get("proposal_path") != "relayed"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_deployments_keep_to_the_protocol() -> None:
    num_tokens = num_linked = 0
    for seed in range(_NUM_SHORT, _NUM_SHORT + _NUM_LONG):
        schedule = draw(seed)
        outcome = run(schedule)
        assert not outcome.violations, explain(schedule, outcome, most_tries=200)
        num_tokens += outcome.num_tokens
        num_linked += outcome.num_linked
    assert num_linked > _NUM_LONG
    assert num_tokens > 10 * _NUM_LONG


@pytest.mark.smoke
def test_a_link_that_dies_lies_lags_or_reorders_changes_no_token_and_opens_no_session() -> None:
    outcomes = [run_link(seed) for seed in range(_NUM_LINKS)]
    for seed, outcome in enumerate(outcomes):
        assert not outcome.violations, (seed, outcome.violations)
    assert set(LINK_FAULTS) == {kind for outcome in outcomes for kind in outcome.faults}
    assert sum(outcome.num_linked for outcome in outcomes) > 5 * _NUM_LINKS
    assert sum(outcome.num_relayed for outcome in outcomes) > 5 * _NUM_LINKS
    assert sum(outcome.num_accepted for outcome in outcomes) > _NUM_LINKS


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
