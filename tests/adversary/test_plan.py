"""Plans: repeatable, complete, and only of what can be done."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.adversary.injection import FLOWS
from tests.adversary.plan import (
    CHILD_KINDS,
    CLOCKS,
    DIRECT,
    GATEWAY_TIER,
    HOSTS,
    KILLS,
    LASTING_S,
    PRIMARY_FAULTS,
    REDIS_FAULTS,
    RESET,
    SILENCES,
    SLOWNESSES,
    STOPS,
    Event,
    all_kinds,
    draw_path,
    leaves_nobody,
    make_plan,
    make_short_plan,
    select_kinds,
)
from tests.adversary.topology import PATHS, REDIS, ROLES, Topology, short_runs

TOPOLOGY = Topology()
FULL = Topology(num_gateways=2, num_http_clients=3, num_processes=2, has_hosts=True, has_clock=True)


def test_a_seed_makes_the_same_plan_again_and_another_seed_another() -> None:
    assert make_plan(7, TOPOLOGY) == make_plan(7, TOPOLOGY)
    assert make_plan(7, TOPOLOGY) != make_plan(8, TOPOLOGY)


def test_every_kind_comes_alone_once_per_round_and_pairs_come_on_top() -> None:
    plan = make_plan(3, TOPOLOGY, rounds=2, num_pairs=5)
    alone = [(event.faults[0].kind, event.faults[0].tier) for event in plan if " + " not in event.label]
    for pair in all_kinds(TOPOLOGY):
        assert alone.count(pair) >= 2
    assert len(plan) == 2 * len(all_kinds(TOPOLOGY)) + 2 * 5
    assert sum(len(event.faults) == 2 for event in plan) >= 8
    assert [event.index for event in plan] == list(range(len(plan)))


def test_the_short_plan_has_every_kind_once_and_stops_an_engine_for_long() -> None:
    for seed, topology in itertools.product(range(50), (TOPOLOGY, FULL, replace(FULL, has_sentinel=True))):
        plan = make_short_plan(seed, topology)
        faults = [fault for event in plan for fault in event.faults]
        assert sorted(fault.kind for fault in faults) == sorted({kind for kind, _ in all_kinds(topology)})
        assert [fault.kind for fault in faults if fault.heal_after_s > 10.0] == ["stop-engine"]
        [judged] = [event for event in plan if "stop-engine" in event.label]
        assert not leaves_nobody(judged, topology)


def test_the_way_of_proposals_is_drawn_and_a_relayed_run_breaks_no_direct_link() -> None:
    assert {draw_path(seed) for seed in range(30)} == set(PATHS)
    assert draw_path(3) == draw_path(3)
    relayed = replace(TOPOLOGY, path="relayed")
    assert "draft-1>target-0" in TOPOLOGY.links
    assert not any(link.startswith("draft") and "target" in link for link in relayed.links)
    assert DIRECT in {fault.tier for event in make_plan(3, TOPOLOGY) for fault in event.faults}
    for plan in (make_plan(3, relayed), make_short_plan(3, relayed)):
        assert DIRECT not in {fault.tier for event in plan for fault in event.faults}


def test_a_lost_direct_link_cuts_off_nobody() -> None:
    [silent] = make_plan(1, TOPOLOGY, kinds=[("partition", DIRECT)])
    assert silent.faults[0].cuts_off() is None
    assert not leaves_nobody(replace(silent, faults=(replace(silent.faults[0], at="draft-*>target-0"),)), TOPOLOGY)


def test_two_at_once_are_two() -> None:
    plan = make_plan(5, TOPOLOGY, num_pairs=60)
    wanted = [event for event in plan if len(event.faults) == 2]
    assert len(wanted) >= 55, "only of some pairs nothing is left for the second"
    for event in wanted:
        first, second = event.faults
        assert first.kind != second.kind or first.tier != second.tier


def test_faults_befall_what_is_there_and_can_be_done_there() -> None:
    doable = {*KILLS, *STOPS, *HOSTS, *FLOWS, RESET, *REDIS_FAULTS, *CLOCKS}
    for event in make_plan(11, TOPOLOGY, rounds=5):
        for fault in event.faults:
            assert fault.kind in doable
            assert fault.heal_after_s <= LASTING_S[1]
            if ">" in fault.at:
                source, destination = fault.at.split(">")
                assert destination in [*TOPOLOGY.services, REDIS]
                assert source == "*" or source.endswith("-*") or source in [*TOPOLOGY.services, *TOPOLOGY.clients]
            else:
                assert fault.at in [*TOPOLOGY.services, REDIS]


def test_kinds_are_selected_by_patterns_and_a_wrong_one_is_named() -> None:
    assert select_kinds([], TOPOLOGY) == all_kinds(TOPOLOGY)
    assert select_kinds(["stop-*:target"], TOPOLOGY) == [
        (f"stop-{what}", "target") for what in ("group", "engine", "servicer")
    ]
    assert select_kinds(["redis-kill", "kill-group:draft"], TOPOLOGY) == [
        ("kill-group", "draft"),
        ("redis-kill", REDIS),
    ]
    with pytest.raises(ValueError, match="meteor"):
        select_kinds(["meteor"], TOPOLOGY)


def test_only_what_takes_all_of_a_tier_leaves_nobody() -> None:
    [one] = make_plan(1, TOPOLOGY, kinds=[("kill-group", "target")])
    fault = one.faults[0]
    other = replace(fault, at="target-1" if fault.at == "target-0" else "target-0")
    assert not leaves_nobody(one, TOPOLOGY)
    assert leaves_nobody(Event(index=0, after_s=0, faults=(fault, other)), TOPOLOGY)
    redis = replace(fault, kind="redis-kill", tier=REDIS, at=REDIS)
    assert not leaves_nobody(Event(index=0, after_s=0, faults=(fault, redis)), TOPOLOGY)


def test_what_befalls_depends_on_what_the_fleet_has() -> None:
    topology = Topology(num_gateways=2, num_http_clients=3)
    assert set(all_kinds(topology)) - set(all_kinds(TOPOLOGY)) == {
        *((kind, GATEWAY_TIER) for kind in (*SILENCES, *SLOWNESSES, RESET)),
        ("kill-group", "gateway"),
        ("stop-group", "gateway"),
    }
    assert added(num_processes=2) == {(kind, "coordinator") for kind in CHILD_KINDS}
    assert added(has_hosts=True) == {(kind, role) for kind in HOSTS for role in ROLES}
    assert added(has_clock=True) == {(kind, REDIS) for kind in CLOCKS}
    assert added(has_sentinel=True) == {(kind, REDIS) for kind in PRIMARY_FAULTS if kind.startswith("primary")}
    sentinel = replace(TOPOLOGY, has_sentinel=True)
    assert not any(f">{REDIS}" in at for at in [*sentinel.links, *(tier for _, tier in all_kinds(sentinel))])


def added(**changes: Any) -> set[tuple[str, str]]:
    """Kinds of a fleet that has something more."""
    return set(all_kinds(replace(TOPOLOGY, **changes))) - set(all_kinds(TOPOLOGY))


def test_the_runs_have_every_kind_of_fault_that_can_be_injected() -> None:
    injected = {*KILLS, *STOPS, *HOSTS, *FLOWS, RESET, *REDIS_FAULTS, *CLOCKS, *PRIMARY_FAULTS}
    short = short_runs(4, has_hosts=True, has_clock=True).values()
    at_length = (FULL, replace(FULL, has_sentinel=True))
    plans = {
        "short": [make_short_plan(4, topology) for topology in short],
        "at length": [make_plan(4, topology) for topology in at_length],
    }
    for name, planned in plans.items():
        assert {fault.kind for plan in planned for event in plan for fault in event.faults} == injected, name
    befallen = {(fault.kind, fault.tier) for plan in plans["at length"] for event in plan for fault in event.faults}
    assert befallen == {pair for topology in at_length for pair in all_kinds(topology)}


def test_faults_of_gateways_and_children_befall_those_that_have_them() -> None:
    faults = [fault for event in make_plan(3, FULL, rounds=3) for fault in event.faults]
    at = [fault.at for fault in faults if fault.tier == GATEWAY_TIER]
    assert at and all(one.startswith("gateway-") and ">coordinator-" in one for one in at)
    assert not any(fault.at.startswith("gateway") and fault.at.endswith(REDIS) for fault in faults)
    assert {fault.at for fault in faults if fault.kind in CHILD_KINDS} == {"coordinator-0"}
    assert {fault.cuts_off() for fault in faults if fault.kind in ("full-disk", "stop-supervisor")} == {None}
    assert all(fault.cuts_off() == fault.at for fault in faults if fault.kind in ("slow-host", "starved-host"))
