"""Planned failures of a run: what ends when, and when it is there again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import simpy

from specdec.coordinator.timings import Timings
from specdec.plan.simulation.coordinator import SimulatedCoordinator
from specdec.plan.simulation.draft_pool import DraftPool
from specdec.plan.simulation.target import SimulatedTarget

SILENT_S = 5.0
"""Seconds until a coordinator finds that a node is gone: a peer's silence, and the ping's time-out
(`keepalive_time_s`, `keepalive_timeout_s`). A process that ends is found at once."""


class Scope(StrEnum):
    """What is gone together."""

    REPLICA = "one replica"
    DRAFT = "one draft"
    NODE = "one node"
    DRAFT_NODE = "one node of drafts"
    ZONE = "one zone"

    @property
    def is_of_drafts(self) -> bool:
        """Only drafts are lost."""
        return self in (Scope.DRAFT, Scope.DRAFT_NODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A part of the fleet is lost at once."""

    scope: Scope
    at_s: float
    down_s: float
    """Seconds until it serves again."""

    @property
    def noticed_s(self) -> float:
        """When others know of it and take its streams: a process ends at once, nodes and zones fall silent."""
        if self.scope is Scope.DRAFT_NODE:
            return self.at_s + Timings().draft_stall_s
        return self.at_s + (SILENT_S if self.scope in (Scope.NODE, Scope.ZONE) else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Targets are replaced one after the other, and so are drafts meanwhile."""

    at_s: float
    drain_s: float
    """Longest time for the sessions of a target to end."""
    start_s: float
    """Seconds from its end until its successor serves."""


Event = Loss | Rollout


def happen(
    event: Event,
    env: simpy.Environment,
    targets: Sequence[SimulatedTarget],
    coordinators: Sequence[SimulatedCoordinator],
    drafts: DraftPool | None = None,
) -> Generator[simpy.Event, Any, None]:
    """A SimPy process that lets an event happen to a fleet."""
    yield env.timeout(event.at_s)
    if isinstance(event, Rollout):
        if drafts is not None:
            env.process(_rolled_drafts(event, env, drafts))
        yield from _rolled(event, env, targets)
        return
    gone = hit(event.scope, targets)
    if drafts is not None:
        env.process(_lost_drafts(event, env, drafts, {target.zone for target in gone}))
    if not event.scope.is_of_drafts:
        yield from _lost(event, env, gone, coordinators)


def hit(scope: Scope, targets: Sequence[SimulatedTarget]) -> list[SimulatedTarget]:
    """The targets that a loss hits: the first one, and those on its node or in its zone."""
    first = next((target for target in targets if target.is_up), None)
    if first is None or scope.is_of_drafts:
        return []
    if scope is Scope.REPLICA:
        return [first]
    alike = (lambda each: each.node == first.node) if scope is Scope.NODE else (lambda each: each.zone == first.zone)
    return [target for target in targets if target.is_up and alike(target)]


def _lost(
    loss: Loss,
    env: simpy.Environment,
    gone: Sequence[SimulatedTarget],
    coordinators: Sequence[SimulatedCoordinator],
) -> Generator[simpy.Event, Any, None]:
    zones = {target.zone for target in gone} if loss.scope is Scope.ZONE else set()
    ended = [each for each in coordinators if each.zone in zones]
    silent_s = loss.noticed_s - loss.at_s
    for target in gone:
        target.freeze()
    yield env.timeout(silent_s)
    for target in gone:
        target.end()
    for coordinator in ended:
        coordinator.end()
    yield env.timeout(max(0.0, loss.down_s - silent_s))
    for target in gone:
        target.begin()
    for coordinator in ended:
        coordinator.begin()


def _lost_drafts(
    loss: Loss, env: simpy.Environment, drafts: DraftPool, zones: set[str]
) -> Generator[simpy.Event, Any, None]:
    up = drafts.up
    if loss.scope is Scope.ZONE:
        gone = drafts.in_zones(zones)
    elif loss.scope is Scope.DRAFT_NODE:
        gone = drafts.on_node(up[0]) if up else []
    else:
        gone = up[:1] if loss.scope is Scope.DRAFT else []
    env.process(drafts.lose(gone, at_once=loss.scope is Scope.DRAFT))
    yield env.timeout(loss.down_s)
    drafts.bring_back(gone)


def _rolled(
    rollout: Rollout, env: simpy.Environment, targets: Sequence[SimulatedTarget]
) -> Generator[simpy.Event, Any, None]:
    for target in targets:
        if not target.is_up:
            continue
        target.drain()
        waited_s, look_s = 0.0, max(0.1, rollout.drain_s / 20)
        while target.num_sessions and waited_s < rollout.drain_s:
            yield env.timeout(look_s)
            waited_s += look_s
        target.end()
        yield env.timeout(rollout.start_s)
        target.begin()


def _rolled_drafts(rollout: Rollout, env: simpy.Environment, drafts: DraftPool) -> Generator[simpy.Event, Any, None]:
    for number in list(drafts.up):
        env.process(drafts.lose([number], at_once=True))
        yield env.timeout(rollout.start_s)
        drafts.bring_back([number])
