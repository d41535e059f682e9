"""Services of two versions on loopback; a restart changes a service's version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import grpc

from specdec.client import Client
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.commands.up.service_process import ServiceProcess
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.support.releases import Build, last_release
from tests.support.services.clusters import TIMEOUTS, TINY_HOLD_OFF_MS
from tests.support.services.faults import CREDIT_WINDOW, eventually
from tests.support.services.model_pair import ModelPair

EXIT_S = 60.0
CALL_S = 10.0
DRAIN_S = 1.0
"""Seconds before a drain cuts off or moves a paused stream."""
COMMON: Mapping[str, object] = {"metrics_port": None, "log_format": "console", "drain_s": DRAIN_S}
REDIS: Mapping[str, object] = {"redis_timeout_s": 20.0, "registry_ttl_s": 10.0}
"""Settings with long timeouts, because look-ups are slow on a busy machine."""
ENGINE: Mapping[str, object] = {"device": "cpu", "num_threads": 1, "engine_cores": "off"}
COORDINATOR: Mapping[str, object] = {
    "resume_secret": "a secret that all coordinators share",
    "credit_window_tokens": CREDIT_WINDOW,
    "reconnect_backoff_max_s": 0.5,
    "discovery_s": 0.2,
    "target_timeout_s": 120.0,
    "reader_stall_s": 900.0,
}
"""Settings of coordinators that let streams pause through a test, and wait for a starting target."""


class MixedFleet:
    """A fleet as a context manager for the main thread, because services end with the thread that started them.

    Names of services begin with the role and a dash. They find each other in Redis, if there is one, or by settings.
    """

    def __init__(self, pair: ModelPair, folder: Path, redis_url: str | None = None) -> None:
        self._pair = pair
        self._redis_url = redis_url
        self._cluster = Cluster([], log_dir=folder, timeouts=TIMEOUTS)
        self.builds: dict[str, Build] = {}
        """Present or last build of each service."""

    def __enter__(self) -> MixedFleet:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for service in self._cluster.services.values():
            service.kill()

    def __str__(self) -> str:
        """Versions of the services, for messages."""
        runs = [f"{name} runs {build.version}" for name, build in self.builds.items()]
        return f"{', '.join(runs)}; logs in {self._cluster.log_dir}"

    def of(self, role: str) -> list[str]:
        """The services of a role."""
        return [name for name in self.builds if name.partition("-")[0] == role]

    def address(self, name: str) -> str:
        """host:port of a service."""
        return self._cluster.services[name].spec.address

    def addresses(self, *names: str) -> str:
        """Several services as one gRPC name."""
        return "ipv4:" + ",".join(map(self.address, names))

    def add(self, name: str, build: Build, **settings: object) -> None:
        """Prepare a service of a version; `start` starts it."""
        role = name.partition("-")[0]
        own: dict[str, object] = {**COMMON, **(REDIS if self._redis_url else {})}
        if role == "coordinator":
            own |= COORDINATOR
        else:
            own |= {**ENGINE, "model": getattr(self._pair, role)}
        if role == "target":
            own["hold_off_ms"] = TINY_HOLD_OFF_MS
        if self._redis_url is not None:
            own["redis_url"] = self._redis_url
        spec = service_spec(role, name, free_port(), RoleSettings(overrides={**own, **settings}), environment={})
        self._cluster.services[name] = ServiceProcess(spec, self._cluster.log_dir / f"{name}.log")
        self._set_build(name, build)

    async def start(self, *names: str) -> None:
        """Start services together; returns when all are healthy and report their version."""
        for name in names:
            self._cluster.services[name].start()
        for name in names:
            await asyncio.to_thread(self._cluster.wait_healthy, name)
        assert await self.versions(*names) == {name: self.builds[name].version for name in names}

    async def stop(self, name: str) -> None:
        """Let a service drain and end; returns when it has ended. Does nothing if it was killed."""
        service = self._cluster.services[name]
        if not service.is_running:
            return
        service.terminate()
        assert await asyncio.to_thread(service.wait, EXIT_S), f"{name} does not end; {self}"
        assert service.exit_code == 0, f"{name} {service.describe_end()}; {self}"

    async def replace(self, name: str, build: Build) -> None:
        """Let a service drain and end, and start another version at its address."""
        await self.stop(name)
        self._set_build(name, build)
        await self.start(name)

    def forget(self, name: str) -> None:
        """Remove an ended service from the fleet."""
        del self.builds[name]

    def kill(self, name: str) -> None:
        """Kill a service at once."""
        self._cluster.kill(name)

    def is_running(self, name: str) -> bool:
        """Whether a service has not ended."""
        return self._cluster.services[name].is_running

    async def until_ready(self, coordinator: str, *replicas: str) -> None:
        """Wait until a coordinator uses these replicas."""
        wanted = {self.address(name) for name in replicas}
        states: dict[str, str] = {}

        async def is_so() -> bool:
            async with Client(self.address(coordinator)) as client:
                status = await client.status()
            states.clear()
            states.update({replica.address: f"{replica.state} {replica.detail}" for replica in status.replicas})
            return wanted <= {replica.address for replica in status.replicas if replica.state == "ready"}

        await eventually(is_so, f"{coordinator} uses {', '.join(replicas)}; {self}")

    async def versions(self, *names: str) -> dict[str, str]:
        """Versions that services report, by name."""
        return {name: await self._version(name) for name in names}

    async def identity(self, name: str) -> pb.ModelIdentity:
        """Identity of a replica's model."""
        return (await self._info(name)).identity

    async def _version(self, name: str) -> str:
        if not name.startswith("coordinator"):
            return (await self._info(name)).version
        async with Client(self.address(name)) as client:
            return (await client.status()).version

    async def _info(self, name: str) -> pb.GetReplicaInfoResponse:
        async with grpc.aio.insecure_channel(self.address(name)) as channel:
            is_target = name.startswith("target")
            stub = (target_pb2_grpc.TargetServiceStub if is_target else draft_pb2_grpc.DraftServiceStub)(channel)
            return await stub.GetReplicaInfo(pb.GetReplicaInfoRequest(), timeout=CALL_S)

    def _set_build(self, name: str, build: Build) -> None:
        self.builds[name] = build
        service = self._cluster.services[name]
        environment = dict(build.environment)  # settings are flags, except for one that not all versions know
        if name.startswith("target") and build.version != last_release().version:
            environment["SPECDEC_TARGET_ADAPTIVE_SPECULATION"] = "false"  # random drafts may not speed decoding up
        service.spec = replace(service.spec, environment=environment)
