"""What the explorer and the random runs are worth: they find defects that are put into the product for them."""

from __future__ import annotations

import pytest

from tests.protocol.exhaustive.bounds import BOUNDS
from tests.protocol.exhaustive.explorer import explore, replay
from tests.protocol.exhaustive.pair_system import PairSystem
from tests.protocol.planted import ON_EXPLORATIONS, ON_LINKS, ON_RUNS
from tests.protocol.runs.link_run import run_link
from tests.protocol.runs.run import run
from tests.protocol.runs.schedule import draw

_MOST_STATES = 5000
_MOST_RUNS = 40


@pytest.mark.parametrize("name", ON_EXPLORATIONS)
def test_going_through_all_orders_finds(name: str) -> None:
    exploration, defect = ON_EXPLORATIONS[name]
    bounds = BOUNDS[exploration].bounds
    with defect.in_place():
        report = explore(lambda: PairSystem(bounds), most_states=_MOST_STATES, must_end=bounds.must_end)
        assert report.finding
        is_of_safety = report.finding in replay(lambda: PairSystem(bounds), report.schedule)
        assert is_of_safety or "end" in report.finding


@pytest.mark.parametrize("name", ON_RUNS)
def test_random_runs_find(name: str) -> None:
    with ON_RUNS[name].in_place():
        schedules = (draw(seed) for seed in range(_MOST_RUNS))
        found = next((schedule for schedule in schedules if run(schedule).violations), None)
    assert found is not None
    assert not run(found).violations


@pytest.mark.parametrize("name", ON_LINKS)
def test_random_links_find(name: str) -> None:
    with ON_LINKS[name].in_place():
        found = next((seed for seed in range(_MOST_RUNS) if run_link(seed).violations), None)
    assert found is not None
    assert not run_link(found).violations
