"""How loaded a target is taken to be: its own report, and what was opened here since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specdec.coordinator.replicas.load import has_room, is_idle, num_sessions, weight, with_room
from specdec.v1 import common_pb2 as pb

NOW_S = 100.0


def a_link(num_own: int = 0, num_own_at_load: int = 0, refused_s: float | None = None, **load: int) -> Any:
    report = pb.LoadReport(**load) if load else None
    sessions = dict.fromkeys(range(num_own))
    return SimpleNamespace(sessions=sessions, load=report, num_own_at_load=num_own_at_load, refused_s=refused_s)


def test_a_target_that_reports_no_sessions_has_ours() -> None:
    assert num_sessions(a_link(num_own=3)) == 3
    assert num_sessions(a_link(num_own=3, num_running=9)) == 3


def test_sessions_of_others_count_and_ours_that_came_and_went_since_the_report() -> None:
    assert num_sessions(a_link(num_own=5, num_own_at_load=2, num_sessions=10)) == 13
    assert num_sessions(a_link(num_own=1, num_own_at_load=2, num_sessions=10)) == 9
    assert num_sessions(a_link(num_own=4, num_own_at_load=6, num_sessions=1)) == 4


def test_prompts_that_wait_weigh_by_their_length() -> None:
    assert weight(a_link(num_sessions=2, num_waiting_tokens=8192)) > weight(a_link(num_sessions=4))


def test_a_target_at_its_limit_or_that_refused_has_no_room() -> None:
    assert has_room(a_link(num_sessions=7, max_sessions=8), NOW_S)
    assert not has_room(a_link(num_sessions=8, max_sessions=8), NOW_S)
    assert not has_room(a_link(num_own=1, num_sessions=7, max_sessions=8), NOW_S)
    assert has_room(a_link(num_sessions=8), NOW_S), "a limit that is not told is none"


def test_who_refused_is_full_for_a_while() -> None:
    assert not has_room(a_link(refused_s=99.5), NOW_S)
    assert has_room(a_link(refused_s=98.0), NOW_S)


def test_full_targets_are_used_only_when_all_are_full() -> None:
    full, free = a_link(num_sessions=8, max_sessions=8), a_link(num_sessions=1, max_sessions=8)
    assert with_room([full, free], NOW_S) == [free]
    assert with_room([full, full], NOW_S) == [full, full]


def test_idle_is_who_said_so_and_got_nothing_since() -> None:
    told = {"num_sessions": 1, "max_sessions": 8, "kv_blocks_total": 10}
    assert is_idle(a_link(**told), NOW_S)
    assert not is_idle(a_link(), NOW_S)
    assert not is_idle(a_link(**told, num_waiting=1), NOW_S)
    assert not is_idle(a_link(num_own=2, num_own_at_load=1, **told), NOW_S)
    assert not is_idle(a_link(**told, kv_blocks_used=10), NOW_S)
