"""Names become addresses, again and again; links come and go with them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from specdec.config import CoordinatorSettings
from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.replicas.roster import Roster
from specdec.coordinator.service import CoordinatorService
from specdec.wire.channel import ReplicaChannel
from specdec.wire.discovery import Discovery, ReplicaAddress, keep_finding
from specdec.wire.settings import PeerSettings
from specdec.wire.tls_files import TlsFilesBroken
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, expected_ids, request, running


class Names:
    """What the resolver of the running loop answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: list[str] | None = []
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **options: Any) -> list[Any]:
        if self.hosts is None:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [
            (socket.AF_INET6, 1, 6, "", (h, port, 0, 0)) if ":" in h else (socket.AF_INET, 1, 6, "", (h, port))
            for h in self.hosts
        ]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


async def test_plain_addresses_need_no_lookup() -> None:
    discovery = Discovery(["a:1", "b:2", "a:1"])
    assert not discovery.has_names
    assert discovery.endpoints == [ReplicaAddress("a:1"), ReplicaAddress("b:2")]


async def test_a_name_stands_for_all_its_addresses_and_is_the_name_in_their_certificates(names: Names) -> None:
    names.hosts = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    discovery = Discovery(["dns:///targets.svc:50052", "other:1"])
    assert discovery.has_names
    assert await discovery.refresh() == [
        ReplicaAddress("10.0.0.1:50052", "targets.svc"),
        ReplicaAddress("10.0.0.2:50052", "targets.svc"),
        ReplicaAddress("[fd00::1]:50052", "targets.svc"),
        ReplicaAddress("other:1"),
    ]


async def test_a_name_server_that_fails_takes_no_replica_away(names: Names) -> None:
    names.hosts = ["10.0.0.1"]
    discovery = Discovery(["dns:///targets.svc:1"])
    before = await discovery.refresh()
    names.hosts = None
    assert await discovery.refresh() == before


async def test_a_name_that_cannot_exist_keeps_no_other_from_being_looked_up() -> None:
    found = await Discovery(["dns:///targets..svc:1", "dns:///localhost:5"]).refresh()
    assert ReplicaAddress("127.0.0.1:5", "localhost") in found


async def test_a_name_of_this_machine_is_really_looked_up() -> None:
    assert ReplicaAddress("127.0.0.1:5", "localhost") in await Discovery(["dns:///localhost:5"]).refresh()


async def test_registered_replicas_are_added_to_the_entries_and_what_is_both_counts_as_configured() -> None:
    registered = [ReplicaAddress("a:1", is_registered=True), ReplicaAddress("c:3", is_registered=True)]
    discovery = Discovery(["b:2", "a:1"], lambda: registered)
    assert discovery.endpoints == [
        ReplicaAddress("b:2"),
        ReplicaAddress("a:1"),
        ReplicaAddress("c:3", is_registered=True),
    ]
    assert not discovery.has_names
    registered.clear()
    assert discovery.endpoints == [ReplicaAddress("b:2"), ReplicaAddress("a:1")]


async def test_what_is_found_is_reported_again_and_again_even_after_a_fault() -> None:
    reports = 0
    is_enough = asyncio.Event()

    def on_found() -> None:
        nonlocal reports
        reports += 1
        if reports == 1:
            raise ValueError("a fault")
        if reports == 3:
            is_enough.set()

    finding = asyncio.create_task(keep_finding(0.001, [], on_found))
    await asyncio.wait_for(is_enough.wait(), 20)
    finding.cancel()


async def test_a_name_server_that_hangs_does_not_keep_the_registry_from_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec.wire.discovery._HELD_UP_S", 0.001)
    reads, found, calls = 0, 0, 0
    is_enough = asyncio.Event()

    async def hang() -> None:
        nonlocal calls
        calls += 1
        await asyncio.Event().wait()

    async def read() -> None:
        nonlocal reads
        reads += 1

    def on_found() -> None:
        nonlocal found
        found += 1
        if reads >= 3 and found >= 3:
            is_enough.set()

    finding = asyncio.create_task(keep_finding(0.001, [hang, read], on_found))
    await asyncio.wait_for(is_enough.wait(), 20)
    finding.cancel()
    assert calls == 1


class IdleLink(ReplicaLink):
    """A link whose stream the test opens and ends."""

    def __init__(self, endpoint: ReplicaAddress) -> None:
        nobody: Any = None
        super().__init__(
            role="target",
            address=endpoint.address,
            channel=ReplicaChannel(endpoint.address, PeerSettings()),
            settings=nobody,
            wire=nobody,
            events=nobody,
            epoch_of=lambda session: 0,
            handle=lambda session, result: None,
            takes_up=True,
        )
        self.has_stream = False

    @property
    def is_up(self) -> bool:
        return self.has_stream

    def _show_state(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


async def test_a_vanished_replica_keeps_its_link_until_its_stream_and_its_sessions_are_gone() -> None:
    links: list[IdleLink] = []
    removed: list[IdleLink] = []
    roster = Roster(IdleLink, lambda now: links.__setitem__(slice(None), now), removed.append)
    roster.update([ReplicaAddress("127.0.0.1:1"), ReplicaAddress("127.0.0.1:2")])
    first = links[0]
    first.has_stream = True
    first.sessions["s"] = None  # type: ignore[assignment]
    roster.update([ReplicaAddress("127.0.0.1:2")])
    assert first in links
    assert first.is_draining
    first.has_stream = False
    roster.update([ReplicaAddress("127.0.0.1:2")])
    assert first in links
    first.sessions.clear()
    roster.update([ReplicaAddress("127.0.0.1:2")])
    assert [link.address for link in links] == ["127.0.0.1:2"]
    assert removed == [first]
    await roster.close()


async def test_a_registered_replica_whose_registration_is_gone_is_used_as_long_as_its_stream_is_up() -> None:
    links: list[IdleLink] = []
    removed: list[IdleLink] = []
    roster = Roster(IdleLink, lambda now: links.__setitem__(slice(None), now), removed.append)
    roster.update([ReplicaAddress("127.0.0.1:1", is_registered=True)])
    link = links[0]
    link.has_stream = True
    roster.update([])
    assert not link.is_draining
    link.has_stream = False
    link.sessions["s"] = None  # type: ignore[assignment]
    roster.update([])
    assert links == [link]  # a session waits for it
    link.sessions.clear()
    roster.update([])
    assert removed == [link]
    assert links == []
    await roster.close()


async def test_a_replica_that_is_registered_and_configured_is_retired_as_a_configured_one() -> None:
    links: list[IdleLink] = []
    roster = Roster(IdleLink, lambda now: links.__setitem__(slice(None), now), lambda link: None)
    roster.update([ReplicaAddress("127.0.0.1:1", is_registered=True)])
    roster.update([ReplicaAddress("127.0.0.1:1", "targets.svc")])
    links[0].has_stream = True
    roster.update([])
    assert links[0].is_draining
    await roster.close()


async def test_a_spare_replica_keeps_its_link_until_its_sessions_are_gone_and_a_later_update() -> None:
    """The streams of both are up. A request may have picked the spare one when it became so."""
    links: list[IdleLink] = []
    removed: list[IdleLink] = []
    roster = Roster(IdleLink, lambda now: links.__setitem__(slice(None), now), removed.append)
    both = [ReplicaAddress("127.0.0.1:1", is_registered=True), ReplicaAddress("127.0.0.1:2", is_registered=True)]
    roster.update(both)
    spare, used = links
    spare.has_stream = used.has_stream = True
    for _ in range(2):
        spare.sessions["s"] = None  # type: ignore[assignment]
        roster.update(both, ["127.0.0.1:2"])
        assert (spare.is_draining, used.is_draining, removed) == (True, False, [])
        roster.update(both)
        assert not spare.is_draining
        spare.sessions.clear()
        roster.update(both, ["127.0.0.1:2"])
        assert links == [spare, used]
    roster.update(both, ["127.0.0.1:2"])
    assert (links, removed) == ([used], [spare])
    roster.update(both)
    assert [link.address for link in links] == ["127.0.0.1:2", "127.0.0.1:1"]
    await roster.close()


async def test_a_replica_that_is_listed_again_is_used_again() -> None:
    links: list[IdleLink] = []
    roster = Roster(IdleLink, lambda now: links.__setitem__(slice(None), now), lambda link: None)
    roster.update([ReplicaAddress("127.0.0.1:1")])
    links[0].has_stream = True
    roster.update([])
    assert links[0].is_draining
    roster.update([ReplicaAddress("127.0.0.1:1")])
    assert not links[0].is_draining
    assert len(links) == 1
    await roster.close()


async def test_a_coordinator_finds_its_replicas_by_name() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    await target.start()
    await draft.start()
    names = {role: (f"dns:///localhost:{r.port}",) for role, r in (("targets", target), ("drafts", draft))}
    async with running([target], [draft], wait_for_draft=False, discovery_s=0.05, **names) as harness:
        while not any(link.is_ready for link in harness.service.fleet.drafts):
            await harness.replica_changed()
        result = await collect(harness.stub.Generate(request()))
        assert [link.address for link in harness.service.fleet.targets if link.is_ready] == [target.address]
    assert result.ids() == expected_ids(target, 20)


async def test_tls_files_that_are_wrong_are_found_at_start_though_no_replica_is(tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_text("no certificate")
    settings = CoordinatorSettings(targets=("dns:///localhost:1",), replica_tls_dir=tmp_path, metrics_port=None)
    service = CoordinatorService(settings, CollectorRegistry())
    with pytest.raises(TlsFilesBroken, match=r"replica_tls_dir: ca\.crt"):
        await service.start()
    await service.stop()
