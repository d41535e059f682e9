"""When a pulse says that an engine is frozen or stuck, and when it does not."""

import pytest

from specdec.replica.bridge.engine_watch import EndCause, EngineWatch
from specdec.replica.bridge.pulse import BEAT_INTERVAL_S, MOST_RANKS, NUM_BYTES, Pulse, PulseReading, new_pulse_file


class Watched:
    """A watch, looked at four times a second of a clock of its own."""

    def __init__(self, stall_s: float | None = None) -> None:
        self.now_s = 0.0
        self.watch = EngineWatch(4.0, stall_s, lambda: self.now_s)
        self.num_beats = 0

    def given_up_after_s(
        self, within_s: float, *, beats: bool = True, turn: int = 0, longest_s: float = 0.0, expected_s: float = 0.0
    ) -> tuple[EndCause, float] | None:
        """The cause and when, if the engine is given up while its pulse stays like this."""
        began_s = self.now_s
        while self.now_s - began_s <= within_s:
            self.now_s += BEAT_INTERVAL_S
            self.num_beats += beats
            if stall := self.watch.look(PulseReading(self.num_beats, turn, longest_s, expected_s)):
                return stall.cause, self.now_s - began_s
        return None


def test_an_engine_without_beats_is_silent_after_the_time_that_is_set() -> None:
    watched = Watched()
    assert watched.given_up_after_s(1.0) is None
    assert watched.given_up_after_s(60.0, beats=False) == (EndCause.SILENT, 4.0)


def test_an_idle_engine_that_beats_is_never_given_up() -> None:
    assert Watched().given_up_after_s(1000.0) is None


def test_a_turn_that_does_not_end_is_stuck_after_six_seconds_where_turns_are_short() -> None:
    watched = Watched()
    assert watched.given_up_after_s(1.0, turn=4) is None
    assert watched.given_up_after_s(60.0, turn=5, longest_s=0.1) == (EndCause.STUCK, 6.25)


@pytest.mark.parametrize(
    ("shown", "given_up_s"),
    [({"longest_s": 1.0}, 20.25), ({"expected_s": 10.0}, 40.25)],
    ids=["longest turn", "what warming up says"],
)
def test_slow_machines_have_more_time_for_a_turn(shown: dict[str, float], given_up_s: float) -> None:
    assert Watched().given_up_after_s(60.0, turn=5, **shown) == (EndCause.STUCK, given_up_s)


def test_a_setting_bounds_a_turn_whatever_was_seen() -> None:
    assert Watched(stall_s=2.0).given_up_after_s(60.0, turn=5, longest_s=9.0) == (EndCause.STUCK, 2.25)


@pytest.mark.parametrize(
    ("marks", "standing"),
    [
        ((), ""),
        ((0, 0), ""),
        ((5, 5, 4), ": step 3 waits for rank 2, which did not begin it"),
        ((6, 4, 0), ": step 3 waits for rank 1, rank 2, which did not begin it"),
        ((6, 5), ": step 3 is not launched by rank 1"),
        ((6, 6), ": all ranks have launched step 3, and a device does not finish it"),
    ],
)
def test_a_stall_names_the_step_and_the_ranks_that_keep_the_others_waiting(
    marks: tuple[int, ...], standing: str
) -> None:
    pulse = Pulse()
    pulse.expect_ranks(len(marks))
    for rank, mark in enumerate(marks):
        pulse.mark_rank(rank, mark)
    now_s = iter(range(100))
    watch = EngineWatch(4.0, 1.0, lambda: next(now_s))
    pulse.begin_turn()
    readings = (pulse.read()._replace(num_beats=beat) for beat in range(90))
    stall = next(stall for reading in readings if (stall := watch.look(reading)))
    assert stall.cause is EndCause.STUCK
    assert stall.reason.partition("(engine_stall_s)")[2] == standing


@pytest.mark.parametrize(("rank", "mark"), [(-1, 0), (MOST_RANKS, 0), (10**9, 0), (0, -1), (0, 2**64)])
def test_marks_out_of_range_are_refused(rank: int, mark: int) -> None:
    with pytest.raises((IndexError, ValueError)):
        Pulse().mark_rank(rank, mark)


def test_turns_that_follow_each_other_are_no_stall() -> None:
    watched = Watched()
    assert all(watched.given_up_after_s(5.0, turn=turn) is None for turn in range(1, 99, 2))


def test_a_watcher_that_was_stopped_itself_blames_nobody() -> None:
    watched = Watched()
    assert watched.given_up_after_s(1.0, turn=5) is None
    watched.now_s += 3600.0
    assert watched.given_up_after_s(1.0, turn=5) is None


def test_waits_for_a_processor_do_not_count_against_an_engine() -> None:
    watched = Watched()
    for _ in range(40):
        watched.now_s += BEAT_INTERVAL_S
        assert watched.watch.look(PulseReading(0, 5, 0.0, 0.0), starved_s=0.24) is None
    assert watched.watch.is_suspicious
    assert watched.given_up_after_s(60.0, beats=False, turn=5) == (EndCause.SILENT, 3.25)


def test_what_one_process_shows_another_reads() -> None:
    fd = new_pulse_file()
    shown, seen = Pulse(fd), Pulse(fd)
    assert NUM_BYTES == 8 * (5 + MOST_RANKS)
    shown.expect_ranks(2)
    shown.mark_rank(1, 7)
    shown.begin_turn()
    assert seen.read().turn == 1
    shown.begin_turn()
    shown.end_turn()
    shown.end_turn()
    shown.expect_turn(1.5)
    reading = seen.read()
    assert (reading.num_beats, reading.turn, reading.expected_turn_s) == (0, 2, 1.5)
    assert reading.longest_turn_s > 0
    assert reading.rank_marks == (0, 7)
