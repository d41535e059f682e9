"""A fleet is upgraded and rolled back service by service, under load: no stream notices.

All streams are compared with the answers of the version that was there first. Some stand still from before the first
service is exchanged until after the last, so that everything that had to do with them has been exchanged meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from specdec.client import Client
from tests.support.releases import Build
from tests.support.services.client_process import ClientProcess
from tests.support.services.every_request import Answer, every_request
from tests.support.services.faults import held_back, sampled_request
from tests.support.services.load import LongStream, SteadyLoad
from tests.support.services.mixed_fleet import MixedFleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

DOCUMENTED = ("target", "draft", "coordinator")
NUM_CLIENTS = 2
NUM_LONG = 3
NUM_LONG_TOKENS = 300
COORDINATORS = ("coordinator-0", "coordinator-1")
SHORT = every_request()
LONG = {f"long {number}": sampled_request(100 + number, max_tokens=NUM_LONG_TOKENS) for number in range(NUM_LONG)}


@dataclass(slots=True)
class Roll:
    """A fleet under load, all of whose services are exchanged."""

    fleet: MixedFleet
    load: SteadyLoad
    settings: Mapping[str, object]
    """Of engines."""

    async def exchange(self, name: str, build: Build) -> None:
        """One service for another version, in its place."""
        self.load.during = f"the exchange of {name}, {self.fleet.builds[name]}, for {build}"
        await self.fleet.replace(name, build)
        await self._settle()

    async def surge(self, name: str, build: Build, instead_of: str) -> None:
        """A replica of another version beside the one that then leaves."""
        self.load.during = f"the exchange of {instead_of}, {self.fleet.builds[instead_of]}, for {name}, {build}"
        self.fleet.add(name, build, **self.settings)
        await self.fleet.start(name)
        await self._settle()
        await self.fleet.stop(instead_of)
        self.fleet.forget(instead_of)
        await self._settle()

    async def _settle(self) -> None:
        """Until all are in use, and all clients have been answered by what there is now."""
        for coordinator in COORDINATORS:
            await self.fleet.until_ready(coordinator, *self.fleet.of("target"), *self.fleet.of("draft"))
        await self.load.goes_on()


@asynccontextmanager
async def under_load(
    fleet: MixedFleet, builds: Mapping[str, Build], settings: Mapping[str, object], replicas: Sequence[str]
) -> AsyncIterator[Roll]:
    """A fleet of the last release, with load from clients of both versions; compares all they got at the end."""
    first = builds["last"]
    for name in replicas:
        fleet.add(name, first, **settings)
    for name in COORDINATORS:
        fleet.add(name, first)
    await fleet.start(*fleet.builds)
    for name in COORDINATORS:
        await fleet.until_ready(name, *replicas)
    both = fleet.addresses(*COORDINATORS)
    bodies = {**SHORT, **LONG}
    async with Client(both) as client:
        completions = await asyncio.gather(*(client.complete(body) for body in bodies.values()))
    wanted = dict(zip(bodies, map(Answer.of, completions), strict=True))
    load = SteadyLoad(both, SHORT, wanted, NUM_CLIENTS)
    async with held_back(both) as client, ClientProcess(first, both, LONG) as older:
        streams = [LongStream(client, body) for body in LONG.values()]
        for stream in streams:
            await stream.has_begun()
        await older.have_begun()
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            await load.goes_on()
            yield Roll(fleet, load, settings)
            load.is_over = True
        assert load.failures == []
        for stream in streams:
            stream.go_on()
        found = dict(zip(LONG, [Answer.of(await stream.task) for stream in streams], strict=True))
        assert not differences(found, wanted), f"streams through the whole roll-out; {fleet}"
        assert not differences(await older.answers(), wanted), f"streams of a client of {first}; {fleet}"


def differences(found: Mapping[str, Answer], wanted: Mapping[str, Answer]) -> dict[str, str]:
    told = {name: found[name].difference(wanted[name]) for name in found}
    return {name: difference for name, difference in told.items() if difference is not None}


@pytest.mark.long
async def test_no_stream_notices_that_everything_is_upgraded(
    alone: MixedFleet, builds: Mapping[str, Build], common_numerics: Mapping[str, object]
) -> None:
    """In the order that docs/upgrades.md gives, replicas by surge."""
    this = builds["this"]
    async with under_load(alone, builds, common_numerics, ("target-0", "draft-0")) as roll:
        await roll.surge("target-1", this, instead_of="target-0")
        await roll.surge("draft-1", this, instead_of="draft-0")
        for name in COORDINATORS:
            await roll.exchange(name, this)
        running = await alone.versions(*alone.builds)
        assert running == dict.fromkeys(["coordinator-0", "coordinator-1", "target-1", "draft-1"], this.version)


@pytest.mark.long
@pytest.mark.parametrize("order", [DOCUMENTED, DOCUMENTED[::-1]], ids="-".join)
async def test_no_stream_notices_an_upgrade_in_place_and_back_in_either_order(
    order: Sequence[str], alone: MixedFleet, builds: Mapping[str, Build], common_numerics: Mapping[str, object]
) -> None:
    """Two of each, one after the other; rolled back in the opposite order."""
    replicas = ("target-0", "target-1", "draft-0", "draft-1")
    async with under_load(alone, builds, common_numerics, replicas) as roll:
        names = [name for role in order for name in alone.of(role)]
        for name in names:
            await roll.exchange(name, builds["this"])
        for name in reversed(names):
            await roll.exchange(name, builds["last"])
        assert set((await alone.versions(*names)).values()) == {builds["last"].version}


@pytest.mark.long
async def test_no_stream_notices_an_upgrade_that_is_given_up_halfway(
    alone: MixedFleet, builds: Mapping[str, Build], common_numerics: Mapping[str, object]
) -> None:
    """One of each is upgraded, and killed in its new version before it goes back: nothing that it held is lost."""
    replicas = ("target-0", "target-1", "draft-0", "draft-1")
    async with under_load(alone, builds, common_numerics, replicas) as roll:
        for name in ("target-0", "draft-0", "coordinator-0"):
            await roll.exchange(name, builds["this"])
        for name in ("coordinator-0", "draft-0", "target-0"):
            alone.kill(name)
            await roll.exchange(name, builds["last"])
