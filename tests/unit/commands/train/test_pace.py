"""Progress of long work: its rate, its end, and the share of time that saving takes."""

from __future__ import annotations

import time

from specdec.commands.train.pace import Pace, Seldom

MIDNIGHT_S = time.mktime((2026, 1, 2, 0, 0, 0, 0, 0, -1))


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_rate_and_end_are_those_of_the_last_minute() -> None:
    clock = Clock()
    pace = Pace(1000, clock, lambda: MIDNIGHT_S)
    assert pace.at(0) == "0 of 1000"
    clock.s += 10
    assert pace.at(5) == "5 of 1000, 2.0 s each, 33 min left, until 00:33"
    for done in range(6, 206):
        clock.s += 1
        text = pace.at(done)
    assert text == "205 of 1000, 1.0 s each, 13 min left, until 00:13"


def test_a_run_that_goes_on_counts_from_where_it_began() -> None:
    clock = Clock()
    pace = Pace(100, clock, lambda: MIDNIGHT_S)
    pace.at(80)
    clock.s += 2
    assert pace.at(90) == "90 of 100, 5/s, 2 s left, until 00:00"


def test_what_takes_long_is_done_less_often() -> None:
    clock = Clock()
    saves = Seldom(30.0, share=0.05, clock=clock)
    assert not saves.due
    clock.s += 31
    assert saves.due
    with saves:
        clock.s += 10
    clock.s += 199
    assert not saves.due
    clock.s += 2
    assert saves.due
    with saves:
        clock.s += 0.1
    clock.s += 31
    assert saves.due
