"""All drafts become slow at once, as after a loss: hedges must not slow down the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import structlog

from specdec.coordinator.replicas.subset import Subset
from tests.support.services.simulated_drafts import World

STEP_S, STEPS_PER_REPORT = 0.010, 25
SUBSET = 64
PLACES = 32
"""Sessions of a draft, at most."""


@dataclass
class Seen:
    """What a run has shown."""

    hits: float
    """Share of the steps of the last quarter that verified a proposal."""
    most_hedged: float
    """Largest share of a coordinator's sessions with two drafts."""
    num_openings: float
    """Openings of a session at a draft, on average."""


def run(
    num_coordinators: int,
    num_drafts: int,
    num_steps: int,
    answer_s: Callable[[int, int], float],
    set_clock: Callable[[Callable[[], float]], None],
    share: float,
) -> Seen:
    """Coordinators with six sessions for each draft, and links to those of their subset (`subset_size`). `answer_s`: of
    a draft's number and sessions."""
    worlds: list[World] = []
    current = 0

    def clock() -> float:
        return worlds[current].now_s if worlds else 1000.0

    worlds += [World(lambda _: None, share=share) for _ in range(num_coordinators)]
    set_clock(clock)
    names, numbers = [f"c{number}" for number in range(num_coordinators)], {f"d{n}": n for n in range(num_drafts)}
    known = [[numbers[name] for name in Subset(SUBSET).chosen(own, names, list(numbers))] for own in names]
    links = [
        dict(zip(own, world.drafts(*[0.0] * len(own)), strict=True)) for own, world in zip(known, worlds, strict=True)
    ]
    at = [[of_world[number] for of_world in links if number in of_world] for number in range(num_drafts)]

    def num_at(number: int) -> int:
        return sum(len(draft.sessions) for draft in at[number])

    for of_world in links:
        for number, draft in of_world.items():
            draft.delay_s = lambda number=number: answer_s(number, num_at(number))  # type: ignore[misc]
    for index, world in enumerate(worlds):
        for number in range(6 * num_drafts // num_coordinators):
            world.open(links[index][known[index][(number + index) % len(known[index])]])
    num_hit = num_counted = 0
    most_hedged = 0.0
    for step in range(num_steps):
        for current, world in enumerate(worlds):
            if not step % STEPS_PER_REPORT:
                for number, draft in links[current].items():
                    draft.tell_load(num_sessions=num_at(number), max_sessions=PLACES)
            world.run(1)
            num_hedged = sum(len(session.drafting.sides) > 1 for session in world.sessions)
            most_hedged = max(most_hedged, num_hedged / len(world.sessions))
            if step >= 3 * num_steps // 4:
                ends = world.target.ends
                num_hit += sum(ends.get(each.session_id, 0) > each.position for each in world.sessions)
                num_counted += len(world.sessions)
    sessions = [session for world in worlds for session in world.sessions]
    openings = sum(session.drafting.num_openings for session in sessions) / len(sessions)
    return Seen(num_hit / num_counted, most_hedged, openings)


def quarter_slow_s(number: int, num_sessions: int) -> float:
    """Answers of every fourth draft take ten times as long."""
    return (0.030 if number % 4 == 0 else 0.003) * max(1, num_sessions)


SIZES = [pytest.param(2, 8, 400, id="small"), pytest.param(10, 60, 600, id="large", marks=pytest.mark.long)]


@pytest.mark.parametrize(("num_coordinators", "num_drafts", "num_steps"), SIZES)
async def test_drafts_that_are_all_too_slow_get_few_hedges_and_become_no_slower(
    num_coordinators: int, num_drafts: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's answers take longer the more sessions it has: with six a little too long for most steps."""

    def answer_s(number: int, num_sessions: int) -> float:
        return 0.008 * max(1, num_sessions)

    def set_clock(clock: Callable[[], float]) -> None:
        monkeypatch.setattr("time.monotonic", clock)

    hedged, alone = (run(num_coordinators, num_drafts, num_steps, answer_s, set_clock, share) for share in (0.125, 0.0))
    assert hedged.most_hedged <= 0.125
    assert alone.most_hedged == 0
    assert hedged.num_openings <= 4, "each hedge takes twice as many late steps as the one before"
    assert hedged.hits >= alone.hits - 0.05


@pytest.mark.parametrize(("num_coordinators", "num_drafts", "num_steps"), SIZES)
async def test_sessions_of_many_slow_drafts_spread_over_the_fast_ones(
    num_coordinators: int, num_drafts: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the drafts is ten times as slow; all coordinators look for spare drafts at once."""

    def set_clock(clock: Callable[[], float]) -> None:
        monkeypatch.setattr("time.monotonic", clock)

    hedged, alone = (
        run(num_coordinators, num_drafts, num_steps, quarter_slow_s, set_clock, share) for share in (0.125, 0.0)
    )
    assert hedged.most_hedged <= 0.125
    assert hedged.hits >= alone.hits + 0.1, "the slow drafts' sessions decode faster, and no others more slowly"
    assert hedged.num_openings <= 3


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_few_sessions_of_three_thousand_drafts_are_hedged_when_a_quarter_becomes_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafts of 1,000 targets, 100 coordinators with subsets and 18,000 sessions: five minutes of a processor."""

    def set_clock(clock: Callable[[], float]) -> None:
        monkeypatch.setattr("time.monotonic", clock)

    seen = run(100, 3000, 150, quarter_slow_s, set_clock, 0.125)
    structlog.get_logger().info("hedged", seen=seen)
    assert 0 < seen.most_hedged <= 0.125
    assert seen.num_openings <= 3
