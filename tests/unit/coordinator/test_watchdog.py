"""What counts as a standstill of a session."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.coordinator.recovery.slowness import SlowTargets
from specdec.coordinator.recovery.watchdog import Watchdog
from specdec.coordinator.sessions.drafting import Drafting, DraftSide
from specdec.coordinator.sessions.target_side import TargetSide

OTHER = SimpleNamespace(is_ready=True)
NOT_SLOW: Any = SimpleNamespace(
    keep=lambda sessions: None, waits=lambda session: None, faster=lambda session, host, now_s: None
)


def moves_after(silent_s: float, *, tells: bool = True, **side_fields: Any) -> list[Any]:
    """Where a session goes whose target has been silent for so long; the bound is 6 s."""
    return moves_at([silent_s], tells=tells, **side_fields)


def moves_at(
    looks_s: Sequence[float], *, tells: bool = True, drafting: Drafting | None = None, **side_fields: Any
) -> list[Any]:
    """The same when it is looked at so many seconds after it was heard."""
    host = SimpleNamespace(address="a", is_up=True, tells_progress=tells)
    side = TargetSide(**{"host": host, "credit_position": 100, "heard_s": 1000.0, **side_fields})
    trace = SimpleNamespace(session_failed=lambda *args: None)
    request = SimpleNamespace(trace=trace)
    session: Any = SimpleNamespace(
        target=side, drafting=drafting or Drafting(), position=10, choice=0, request=request, log_fields={}, finish=None
    )
    moved: list[Any] = []
    fleet: Any = SimpleNamespace(
        find_target=lambda request, besides, **_: OTHER,
        find_idle=lambda request, besides: None,
        failed=lambda host: None,
    )
    moves: Any = SimpleNamespace(move=lambda session, other: moved.append(other))
    sessions: Any = [session]
    watchdog = Watchdog(sessions=sessions, fleet=fleet, moves=moves, slow=NOT_SLOW, stall_s=6.0, timeout_s=30.0)
    for look_s in looks_s:
        watchdog.look(1000.0 + look_s)
    return moved


def is_moved_at_s(
    tokens_per_s: float, *, step_us: int = 1000, num_left: int = 1000, starved: Sequence[int] = (), epochs: int = 1
) -> float | None:
    """Seconds until a session is moved to an idle target, which takes `step_us` for a step; None: not in a minute."""
    session: Any = SimpleNamespace(
        session_id="s",
        position=100,
        num_prompt_tokens=100,
        sampling=SimpleNamespace(max_tokens=num_left),
        target=SimpleNamespace(epoch=1),
        request=None,
    )
    idle = SimpleNamespace(load=SimpleNamespace(step_us=step_us))
    fleet: Any = SimpleNamespace(find_idle=lambda request, besides: idle)
    slow, host = SlowTargets(fleet), Any
    for second in range(60):
        session.position = 100 + int(second * tokens_per_s)
        session.target.epoch = 1 + second * (epochs - 1)
        if second in starved:
            slow.waits(session)
        elif slow.faster(session, host, float(second)) is not None:  # type: ignore[arg-type]
            return second
    return None


def test_a_session_moves_where_it_would_be_done_much_sooner() -> None:
    assert is_moved_at_s(10.0) == 3  # 100 s here, 1 s there
    assert is_moved_at_s(300.0) is None  # a third of the other's speed
    assert is_moved_at_s(10.0, num_left=40) is None  # done in 4 s
    assert is_moved_at_s(10.0, step_us=0) is None  # an older target does not tell its speed
    assert is_moved_at_s(0.0) is None  # a standstill has a bound of its own


def test_a_wait_for_the_client_and_a_new_opening_are_not_slowness() -> None:
    assert is_moved_at_s(10.0, starved=range(0, 60, 2)) is None
    assert is_moved_at_s(10.0, epochs=2) is None


def test_after_a_move_a_session_is_measured_for_twice_as_long() -> None:
    session: Any = SimpleNamespace(
        session_id="s", position=0, num_prompt_tokens=0, sampling=SimpleNamespace(max_tokens=10**6), request=None
    )
    session.target = SimpleNamespace(epoch=1)
    idle = SimpleNamespace(load=SimpleNamespace(step_us=1000))
    slow = SlowTargets(SimpleNamespace(find_idle=lambda request, besides: idle))  # type: ignore[arg-type]
    moved = []
    for second in range(40):
        session.position += 10
        if slow.faster(session, Any, float(second)) is not None:  # type: ignore[arg-type]
            moved.append(second)
            session.target.epoch += 1
    assert moved == [3, 10, 23]
    slow.keep([])
    assert slow.faster(session, Any, 40.0) is None  # type: ignore[arg-type]


def test_a_session_moves_when_the_bound_has_passed_and_not_before() -> None:
    assert moves_after(5.9) == []
    assert moves_after(6.0) == [OTHER]


def test_targets_that_tell_no_progress_get_three_times_as_long() -> None:
    assert moves_after(17.9, tells=False) == []
    assert moves_after(18.0, tells=False) == [OTHER]


@pytest.mark.parametrize(("num_stalls", "bound_s"), [(1, 12.0), (3, 48.0), (20, 384.0)])
def test_each_move_doubles_the_patience(num_stalls: int, bound_s: float) -> None:
    assert moves_after(bound_s - 0.1, num_stalls=num_stalls) == []
    assert moves_after(bound_s, num_stalls=num_stalls) == [OTHER]


def test_a_session_without_credit_is_no_standstill() -> None:
    assert moves_after(1000.0, credit_position=10) == []


def test_a_session_that_waits_for_its_turn_or_its_next_try_is_no_standstill() -> None:
    assert moves_after(1000.0, is_held=True) == []
    assert moves_after(1000.0, retry=SimpleNamespace()) == []


def test_nobody_is_to_blame_for_a_time_in_which_the_process_itself_stood_still() -> None:
    assert moves_at([0.0, 1.0, 2.0, 30.0]) == []
    assert moves_at([0.0, 1.0, 2.0, 30.0, 31.0, 32.0, 32.9]) == []
    assert moves_at([0.0, 1.0, 2.0, 30.0, 31.0, 32.0, 33.0]) == [OTHER]


def test_a_standstill_hides_none_of_the_silence_before_and_after_it() -> None:
    assert moves_at([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.9, 9.9]) == [OTHER]


def test_looks_that_are_a_little_late_do_not_make_anybody_more_patient() -> None:
    assert moves_at([0.0, 1.4, 2.8, 4.2, 5.6]) == []
    assert moves_at([0.0, 1.4, 2.8, 4.2, 5.6, 6.0]) == [OTHER]


def test_a_draft_is_not_to_blame_for_it_either() -> None:
    host: Any = SimpleNamespace()
    draft = DraftSide(host, 1, unanswered_s=1001.0)
    moves_at([0.0, 1.0, 2.0, 30.0], drafting=Drafting([draft]))
    assert draft.unanswered_s == 1028.0


def test_a_session_that_cannot_be_looked_at_leaves_no_other_unwatched() -> None:
    moved: list[Any] = []
    host = SimpleNamespace(address="a", is_up=True, tells_progress=True)
    trace = SimpleNamespace(session_failed=lambda *args: None)

    def session(credit_position: Any) -> Any:
        side = TargetSide(host=host, credit_position=credit_position, heard_s=1000.0)  # type: ignore[arg-type]
        request = SimpleNamespace(trace=trace)
        fields: dict[str, Any] = {"position": 10, "choice": 0, "log_fields": {}, "finish": None}
        return SimpleNamespace(target=side, drafting=Drafting(), request=request, **fields)

    fleet: Any = SimpleNamespace(find_target=lambda *_, **__: OTHER, failed=lambda host: None)
    moves: Any = SimpleNamespace(move=lambda session, other: moved.append(session))
    broken, good = session(None), session(100)
    sessions: Any = [broken, good]
    Watchdog(sessions=sessions, fleet=fleet, moves=moves, slow=NOT_SLOW, stall_s=6.0, timeout_s=30.0).look(1006.0)
    assert moved == [good]
