"""Services with their default settings, joined by the proxy, and started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import psutil

from specdec.commands.up.cluster import RoleSettings, free_port, service_spec
from specdec.commands.up.service_process import ServiceProcess
from tests.adversary.health import end_when_hung, not_ready, unhealthy
from tests.adversary.hosts.hosts import Hosts
from tests.adversary.proxy_process import ProxyProcess
from tests.adversary.redis_fault import FaultyRedis
from tests.adversary.topology import PATHS, REDIS, Topology, role_of
from tests.adversary.waiting import POLL_S
from tests.support.services.faults import scrape
from tests.support.services.model_pair import ModelPair

HOST = "127.0.0.1"
START_S = 300.0
RESTART_S = 1.0
"""From a service's end to its restart, unless a fault says otherwise: what Kubernetes takes at first."""
_ANSWERS = "specdec_coordinator_draft_latency_seconds_count"
ENGINE_MODULE = "specdec.replica.bridge.engine_child"
Say = Callable[[str], None]


class FleetFailed(Exception):
    """The fleet did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What is started. All that is not named here is left at its default, time-outs above all."""

    pair: ModelPair
    topology: Topology = field(default_factory=Topology)
    target: Mapping[str, object] = field(default_factory=dict)
    draft: Mapping[str, object] = field(default_factory=dict)
    coordinator: Mapping[str, object] = field(default_factory=dict)
    api_key: str | None = None
    """Who asks coordinators for their status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A service that ended."""

    name: str
    at_s: float
    exit_code: int
    last_lines: tuple[str, ...]


class Fleet:
    """Use as an async context manager, in the main thread: services die with the thread that started them."""

    def __init__(self, settings: FleetSettings, folder: Path, say: Say) -> None:
        self.settings = settings
        self.topology = settings.topology
        self.folder = folder
        self.proxy = ProxyProcess()
        self.redis = FaultyRedis(
            folder / "redis", has_sentinel=self.topology.has_sentinel, has_clock=self.topology.has_clock
        )
        self.hosts = Hosts(self.topology.services, folder) if self.topology.has_hosts else None
        self.services: dict[str, ServiceProcess] = {}
        self.metrics_ports: dict[str, int] = {}
        self.endings: list[Ending] = []
        self.started_s: dict[str, float] = {}
        self.restart_s: dict[str, float] = {}
        """How long a service that ends next stays away."""
        self._target_addresses: list[str] = []
        self._client_ports: dict[tuple[str, str], int] = {}
        self._groups: set[int] = set()
        self._say = say
        self._watches: list[asyncio.Task[None]] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Fleet:
        try:
            await self._stack.enter_async_context(self.proxy)
            if self.hosts is not None:
                self._stack.enter_context(self.hosts)
            self._stack.enter_context(self.redis)
            self.confine_redis()
            self._stack.callback(self._end_all)
            await self._prepare()
            for name in self.services:
                await self._start(name)
            if missing := await self.whole(START_S):
                raise FleetFailed(f"not up after {START_S:g} s: {'; '.join(missing)}; logs in {self.folder}")
            await self._check_links()
            self._watches = [asyncio.create_task(self._keep_running(), name="fleet")]
            for name in self.topology.of("gateway"):
                self._watches.append(asyncio.create_task(end_when_hung(self.services[name]), name=f"watch of {name}"))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._stack.aclose()

    def address_for(self, client: str) -> str:
        """All coordinators, as a gRPC name with several addresses, by this client's own links."""
        ports = [self._client_ports[client, coordinator] for coordinator in self.topology.of("coordinator")]
        turn = int(client.rpartition("-")[2]) % len(ports)
        return "ipv4:" + ",".join(f"{HOST}:{port}" for port in [*ports[turn:], *ports[:turn]])

    def url_for(self, http_client: str, turn: int = 0) -> str:
        """A gateway, past the proxy: a broken connection of a client to it is the client's loss.

        At each turn it is the next one.
        """
        return f"http://{self.direct_address(self.gateway_for(http_client, turn))}"

    def gateway_for(self, http_client: str, turn: int = 0) -> str:
        """The gateway's name."""
        names = self.topology.of("gateway")
        return names[(int(http_client.rpartition("-")[2]) + turn) % len(names)]

    def has_ended_since(self, name: str, at_s: float) -> bool:
        """Whether a service has ended since then, of time.monotonic()."""
        return not self.services[name].is_running or any(e.name == name and e.at_s >= at_s for e in self.endings)

    def confine_redis(self) -> None:
        """Let Redis, which may have been started again, live on its host."""
        if self.hosts is not None:
            self.hosts.add(REDIS, self.redis.pid)

    def direct_address(self, name: str) -> str:
        """A service, past the proxy."""
        return self.services[name].spec.address

    def engine_of(self, name: str) -> psutil.Process | None:
        """The engine process of a replica, if it is there."""
        pid = self.services[name].pid
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                if ENGINE_MODULE in child.cmdline():
                    return child
        return None

    def processes(self) -> dict[str, psutil.Process]:
        """All processes that run, by name; an engine is NAME/engine."""
        found = {}
        for name, service in self.services.items():
            if service.is_running:
                found[name] = psutil.Process(service.pid)
            engine = self.engine_of(name) if role_of(name) in ("target", "draft") else None
            if engine is not None:
                found[f"{name}/engine"] = engine
        found[REDIS] = psutil.Process(self.redis.pid)
        return found

    def orphans(self) -> list[psutil.Process]:
        """Processes that are left of services that have ended."""
        current = {service.pid for service in self.services.values() if service.is_running}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                group = os.getpgid(process.pid)
                # Numbers of groups are used again.
                is_ours = group in self._groups and any("specdec" in word for word in process.cmdline())
                if is_ours and group not in current and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    async def whole(self, timeout_s: float) -> list[str]:
        """Wait until every service is healthy and every coordinator uses every replica; returns what is not by then."""
        ends_s = time.monotonic() + timeout_s
        while missing := await self.missing():
            if time.monotonic() > ends_s:
                return missing
            await asyncio.sleep(POLL_S)
        return []

    async def missing(self) -> list[str]:
        """What is not as it should be, now."""
        checks = [unhealthy(name, service) for name, service in self.services.items()]
        coordinators = [self.services[name] for name in self.topology.of("coordinator")]
        views = [not_ready(one, self.topology, self.settings.api_key) for one in coordinators]
        return [line for found in await asyncio.gather(*checks, *views) for line in found]

    async def is_healthy(self, name: str) -> bool:
        """Whether a service answers SERVING within a second."""
        return not await unhealthy(name, self.services[name])

    async def _prepare(self) -> None:
        path = self.topology.path
        ports = {name: free_port() for name in self.topology.services}
        self.metrics_ports = {name: free_port() for name in self.topology.services}
        for client in self.topology.clients:
            for coordinator in self.topology.of("coordinator"):
                port = await self.proxy.listen(coordinator, ports[coordinator], source=client)
                self._client_ports[client, coordinator] = port
        for name in self.topology.of("gateway"):
            seen_at = [
                await self.proxy.listen(coordinator, ports[coordinator], source=name)
                for coordinator in self.topology.of("coordinator")
            ]
            own: dict[str, object] = {"coordinators": [f"{HOST}:{port}" for port in seen_at], "log_format": "console"}
            self._add(name, ports[name], own)
        for name in self.topology.users_of_redis:
            role, port = role_of(name), ports[name]
            redis_port = await self.proxy.listen(REDIS, self.redis.port, source=name)
            advertised = port
            if role != "coordinator":
                advertised = await self.proxy.listen(name, port, is_between_hosts=path == "network")
            if role == "target":
                self._target_addresses.append(f"{HOST}:{advertised}")
            own = {
                "redis_url": self.redis.url_at(redis_port),
                "advertise_address": f"{HOST}:{advertised}",
                "metrics_port": self.metrics_ports[name],
                "log_format": "console",
            }
            if role == "coordinator":
                own |= {"proposal_path": "relayed" if path == "relayed" else "auto"}
                if name == self.topology.of(role)[0]:
                    own |= {"num_processes": self.topology.num_processes}
                own |= {"resume_secret": "0123456789abcdef" * 4, **self.settings.coordinator}
            elif role == "target":
                own |= {"model": self.settings.pair.target, "device": "cpu", "engine_cores": "off"}
                own |= self.settings.target
            else:
                own |= {"model": self.settings.pair.draft, "device": "cpu", "engine_cores": "off"}
                own |= {"link_targets": self._target_addresses}
                own |= self.settings.draft
            self._add(name, port, own)

    def _add(self, name: str, port: int, settings: Mapping[str, object]) -> None:
        spec = service_spec(role_of(name), name, port, RoleSettings(overrides=settings), environment={})
        folder = self.folder
        if self.hosts is not None:
            folder = self.hosts[name].disk.folder
            spec = replace(spec, environment={**spec.environment, "TMPDIR": str(folder)})
        self.services[name] = ServiceProcess(spec, folder / f"{name}.log")

    async def _check_links(self) -> None:
        """A link that nothing goes through is one that no fault can befall."""
        connections = await self.proxy.connections()
        # A draft calls a target for its first session; clients and gateways call coordinators for requests.
        later = ("client", "gateway", *self.topology.direct_links)
        links = [name for name in self.topology.links if not name.startswith(later)]
        if unused := [name for name in links if not connections.get(name)]:
            raise FleetFailed(f"nothing goes through {', '.join(unused)}; there are {connections}")

    async def ways(self) -> dict[str, int]:
        """Answers of drafts that coordinators have measured since they started, by their way.

        Raises FleetFailed where a way is used that the topology does not have, or its direct links are unused.
        """
        ways = {"direct": 0, "relayed": 0}
        for coordinator in self.topology.of("coordinator"):
            page = await asyncio.to_thread(scrape, self.metrics_ports[coordinator])
            for way in ways:
                ways[way] += int(page.get(f"{_ANSWERS}{{path={way}}}", 0))
        if bool(ways["direct"]) == (self.topology.path == "relayed"):
            raise FleetFailed(f"{ways} answers of drafts with {self.topology.path}: {PATHS[self.topology.path]}")
        return ways

    async def _start(self, name: str) -> None:
        service = self.services[name]
        service.start()
        assert service.pid is not None
        if self.hosts is not None:
            self.hosts.add(name, service.pid)
        self._groups.add(service.pid)
        self.started_s[name] = time.monotonic()
        if role_of(name) in ("coordinator", "draft"):  # They share the listeners of replicas.
            await self.proxy.set_owner(name, service.pid)

    async def _keep_running(self) -> None:
        due_s: dict[str, float] = {}
        while True:
            now = time.monotonic()
            for name, service in self.services.items():
                code = service.exit_code
                if code is None:
                    continue
                if name not in due_s:
                    self.endings.append(
                        Ending(name=name, at_s=now, exit_code=code, last_lines=tuple(service.last_log_lines(8)))
                    )
                    due_s[name] = now + self.restart_s.pop(name, RESTART_S)
                elif now >= due_s[name]:
                    del due_s[name]
                    await self._start(name)
            await asyncio.sleep(POLL_S)

    def _end_all(self) -> None:
        orphans = self.orphans()
        for service in self.services.values():
            service.kill()
        for process in orphans:
            with contextlib.suppress(psutil.Error):
                process.kill()
