"""A run: an undisturbed one of every request, then clients and faults together, then the verdict."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.client import Completion
from specdec.v1 import coordinator_pb2 as api
from tests.adversary.availability import Availability
from tests.adversary.clients import Clients, undisturbed
from tests.adversary.fleet import Fleet, FleetSettings
from tests.adversary.http_clients import HttpClients
from tests.adversary.injection import inject
from tests.adversary.machine import Machine
from tests.adversary.plan import KILLS, STOPS, Event, leaves_nobody
from tests.adversary.progress import Progress, Window
from tests.adversary.recovery import PROTOCOLS, EventRecord
from tests.adversary.topology import PATHS
from tests.adversary.verdict import NO_EVENT, Verdict
from tests.adversary.waiting import POLL_S, until

BOUND_S = 10.0
"""Within which every stream goes on, while there is a target and a coordinator that nothing is wrong with."""
WHOLE_S = 120.0
"""Within which all services are healthy and used again after a fault. To load takes a busy machine most of it."""
ORPHANS_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """What to do, beside the fleet's settings."""

    events: Sequence[Event]
    requests: Sequence[api.GenerateRequest]
    num_requests: int
    """At least so many answers are compared; the run goes on without faults until there are."""
    seed: int
    bound_s: float = BOUND_S
    seconds: float = math.inf
    """Events begin within this time."""


@dataclass(slots=True, kw_only=True)
class ChaosResult:
    """What came of it."""

    verdict: Verdict
    records: list[EventRecord] = field(default_factory=list)
    wall_s: float = 0.0
    path: str = ""
    """One of `PATHS`."""
    ways: dict[str, int] = field(default_factory=dict)
    """Answers of drafts in the undisturbed run, by their way."""
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By service with a host: bytes at their highest, and processes that were killed for want of memory."""


async def run_chaos(
    fleet_settings: FleetSettings, settings: ChaosSettings, folder: Path, say: Callable[[str], None]
) -> ChaosResult:
    """Run to the end. Raises FleetFailed when the fleet does not start."""
    async with Fleet(fleet_settings, folder, say) as fleet:
        say(f"{len(fleet.services)} services are up; running {len(settings.requests)} requests undisturbed")
        references = await undisturbed(fleet, settings.requests)
        tokens = sum(reference.num_tokens for reference in references)
        ways = await fleet.ways()
        say(f"path {fleet.topology.path}: {PATHS[fleet.topology.path]}; answers of drafts so far: {ways}")
        say(f"{tokens} tokens; {fleet.topology.num_clients} clients and {len(settings.events)} events begin")
        result = await ChaosRun(fleet, settings, references, say).run()
        result.path, result.ways = fleet.topology.path, ways
        return result


class ChaosRun:
    """Clients and faults, on a fleet that is up."""

    def __init__(
        self, fleet: Fleet, settings: ChaosSettings, references: Sequence[Completion], say: Callable[[str], None]
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._say = say
        self._verdict = Verdict(say)
        self._progress = Progress()
        self._availability = Availability(fleet)
        given = fleet, settings.requests, references, self._progress, self._verdict, settings.seed
        self._clients = Clients(*given)
        self._http_clients = HttpClients(*given)
        self._records: list[EventRecord] = []
        self._machine = Machine()

    async def run(self) -> ChaosResult:
        """To the end of all events and requests."""
        began_s = time.monotonic()
        asking = asyncio.create_task(self._ask(), name="clients")
        watching = asyncio.create_task(self._watch(), name="watch")
        straining = asyncio.create_task(self._machine.watch(), name="machine")
        try:
            for event in self._settings.events:
                if time.monotonic() - began_s > self._settings.seconds:
                    break
                await asyncio.sleep(event.after_s)
                await self._happen(event)
            enough = asyncio.create_task(until(self._have_enough, math.inf), name="enough")
            # Clients that ended before were ended by a fault of the harness, which is then raised.
            await asyncio.wait([enough, asking], return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            self._clients.end()
            self._http_clients.end()
            await asking
        finally:
            for task in (asking, watching, straining):
                task.cancel()
            await asyncio.gather(asking, watching, straining, return_exceptions=True)
        await self._look_for_orphans()
        memory = {} if self._fleet.hosts is None else self._fleet.hosts.peaks()
        for name, (_, num_killed) in memory.items():
            if num_killed:
                self._verdict.fail("memory", f"{num_killed} processes of {name} were killed at its limit")
        wall_s = time.monotonic() - began_s
        return ChaosResult(verdict=self._verdict, records=self._records, wall_s=wall_s, memory=memory)

    async def _ask(self) -> None:
        await asyncio.gather(self._clients.run(), self._http_clients.run())

    async def _have_enough(self) -> bool:
        return self._verdict.num_done >= self._settings.num_requests

    async def _happen(self, event: Event) -> None:
        record = EventRecord(
            index=event.index,
            label=event.label,
            description=event.describe(),
            leaves_nobody=leaves_nobody(event, self._fleet.topology),
        )
        verdict = self._verdict
        verdict.event, verdict.label = event.index, event.label
        self._say(event.describe())
        self._machine.take()
        num_endings = len(self._fleet.endings)
        window = await self._inject_all(event)
        missing = await self._fleet.whole(WHOLE_S)
        now = time.monotonic()
        record.whole_s = None if missing else now - window.start_s
        for line in missing:
            verdict.fail("not whole", f"after {WHOLE_S:g} s: {line}")

        async def have_all_moved() -> bool:
            return self._progress.have_all_moved_since(now)

        await until(have_all_moved, self._settings.bound_s)
        self._progress.close_window(window)
        record.stalls_s = sorted(window.longest_s.values())
        for protocol, beginning in PROTOCOLS.items():
            of_it = [stood_s for name, stood_s in window.longest_s.items() if name.startswith(beginning)]
            record.worst_s[protocol] = max(of_it, default=0.0)
        record.strain = self._machine.take()
        record.descriptors = self._descriptors()
        self._note_endings(event, num_endings)
        self._records.append(record)
        self._say(
            f"  worst stall {window.worst_s:.2f} s of {len(record.stalls_s)} streams, whole after"
            f" {now - window.start_s:.1f} s; processors wanted {record.strain.waited:.0%} of the time, clients late by"
            f" {record.strain.lag_s:.2f} s; {verdict.num_done} answers, {len(verdict.failures)} failures"
        )
        verdict.event, verdict.label = None, NO_EVENT

    async def _inject_all(self, event: Event) -> Window:
        windows: list[Window] = []

        async def one(number: int) -> None:
            fault = event.faults[number]
            await asyncio.sleep(event.apart_s * number)

            def on_injected() -> None:
                if not windows:
                    windows.append(self._progress.open_window())
                self._availability.cut(fault)

            await inject(fault, self._fleet, on_injected)
            if not await self._availability.mend(fault, WHOLE_S):
                self._verdict.fail("not whole", f"{fault.at} is not healthy {WHOLE_S:g} s after {fault.label}")

        async with asyncio.TaskGroup() as group:
            for number in range(len(event.faults)):
                group.create_task(one(number))
        return windows[0]

    def _note_endings(self, event: Event, num_before: int) -> None:
        """A service that ends without having been killed or stopped is a failure."""
        meant = {fault.at for fault in event.faults if fault.kind in (*KILLS, *STOPS)}
        for ending in self._fleet.endings[num_before:]:
            if ending.name not in meant:
                lines = "\n    ".join(ending.last_lines)
                self._verdict.fail("died", f"{ending.name} ended with {ending.exit_code}:\n    {lines}")

    def _descriptors(self) -> dict[str, tuple[int, int]]:
        return {
            name: (process.pid, process.num_fds())
            for name, process in self._fleet.processes().items()
            if process.is_running()
        }

    async def _watch(self) -> None:
        """Tell of streams that stand for too long, once each time."""
        while True:
            for stream, stood_s in self._progress.stuck(self._settings.bound_s, self._availability.since_s):
                self._verdict.fail("stuck", f"{stream.name} has stood for {stood_s:.1f} s")
            await asyncio.sleep(POLL_S)

    async def _look_for_orphans(self) -> None:
        async def are_gone() -> bool:
            return not self._fleet.orphans()

        await until(are_gone, ORPHANS_S)
        for process in self._fleet.orphans():
            self._verdict.fail("orphan", f"{process} outlived its service")
