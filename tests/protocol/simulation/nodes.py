"""The programs of a deployment, each with the lives that it has had so far."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry

import specdec.draft_service.__main__
import specdec.target_service.__main__
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.coordinator.service import CoordinatorService
from specdec.coordinator.timings import Timings
from specdec.replica.bridge.engine_watch import EndCause
from specdec.replica.bridge.replica_service import ReplicaService
from tests.protocol.simulation.engine_process import SimulatedEngine
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.server import Server
from tests.protocol.simulation.virtual_loop import Process

_TIMINGS = Timings(
    connect_timeout_s=1.0, reconnect_first_s=0.05, draft_reopen_s=0.1, draft_stall_s=1.0, ejection_s=1.0,
    ejection_max_s=4.0,
)  # fmt: skip
_ROLES = {"target": specdec.target_service.__main__.ROLE, "draft": specdec.draft_service.__main__.ROLE}
_PORT = 50051
ServiceT = TypeVar("ServiceT", bound=CoordinatorService | ReplicaService)


def address_of(name: str) -> str:
    """Where a node listens."""
    return f"{name}:{_PORT}"


class Node(Generic[ServiceT]):
    """A program that can be started, killed, frozen and stopped in order."""

    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self.network = network
        self.process: Process | None = None
        self.num_lives = 0
        self.service: ServiceT | None = None
        """Of the process that is up."""
        self.is_leaving = False
        """It stops in order."""

    @property
    def is_up(self) -> bool:
        """There is a process, which may be frozen."""
        return self.process is not None

    @property
    def is_frozen(self) -> bool:
        """There is a process, and it is stopped."""
        return self.process is not None and self.process.is_frozen

    def start(self) -> Process:
        """A new life."""
        self.num_lives += 1
        self.is_leaving = False
        process = self.process = Process(self.network.loop, self.name)
        process.start(self._guarded(self._main(process)), f"main {self.name}")
        return process

    def kill(self) -> None:
        """SIGKILL, or the machine is gone."""
        process, self.process = self.process, None
        if process is None:
            return
        server = self.network.servers.get(address_of(self.name))
        if server is not None:
            server.is_listening = False
        process.kill()
        self._bury(process)

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.process is not None and not self.process.is_frozen:
            self.process.freeze()
            self.network.frozen(self.process)

    def thaw(self) -> None:
        """SIGCONT."""
        if self.process is not None and self.process.is_frozen:
            self.process.thaw()

    def leave(self, drain_s: float) -> None:
        """SIGTERM: stop in order; the process is gone afterwards."""
        if self.process is not None and not self.is_leaving:
            self.is_leaving = True
            self.process.start(self._leave(self.process, drain_s), f"leave {self.name}")

    def _make_service(self) -> ServiceT:
        """The product's service, built as its program does it."""
        raise NotImplementedError

    async def _main(self, process: Process) -> None:
        service = self.service = self._make_service()
        server = Server(self.network, process, address_of(self.name))
        service.register(server)  # type: ignore[arg-type]
        server.start()
        await service.start()

    async def _leave(self, process: Process, drain_s: float) -> None:
        if (service := self.service) is not None:
            await service.drain(drain_s)
            await self.network.servers[address_of(self.name)].stop()
            await service.stop()
        self._gone(process)

    def _bury(self, process: Process) -> None:
        self.service = None
        self.network.died(process)

    def _gone(self, process: Process) -> None:
        """A process that left has nothing more to do."""
        if self.process is process:
            self.kill()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.network.loop.call_exception_handler({"message": f"{self.name} failed", "exception": error})


class ReplicaNode(Node[ReplicaService]):
    """A target or a draft: its servicer and its engine."""

    STEP_S = 0.005
    """How long a step takes."""

    def __init__(self, network: Network, role: str, number: int, link_targets: Sequence[str] = ()) -> None:
        super().__init__(network, f"{role}-{number}")
        self.role = role
        common: dict[str, Any] = {
            "model": f"tiny-{role}",
            "engine_cores": "off",
            "max_sessions": 6,
            "load_timeout_s": 60.0,
            "engine_restarts": 1000,
        }
        self.settings = (
            TargetSettings(**common) if role == "target" else DraftSettings(**common, link_targets=link_targets)
        )
        self.step_s = self.STEP_S

    @property
    def engine(self) -> SimulatedEngine | None:
        """The engine's latest life, if there is one."""
        if self.process is None or self.service is None:
            return None
        engine: Any = self.service._keeper.engine
        return engine if isinstance(engine, SimulatedEngine) else None

    def end_engine(self, cause: EndCause) -> None:
        """Its engine is gone; its servicer is not."""
        if (engine := self.engine) is not None and engine.is_ready:
            engine._servicer.call(engine.end, cause, str(cause))

    def _make_service(self) -> ReplicaService:
        return ReplicaService(_ROLES[self.role], self.settings, CollectorRegistry())

    def freeze(self) -> None:
        """The whole container."""
        super().freeze()
        if (engine := self.engine) is not None:
            engine.process.freeze()

    def thaw(self) -> None:
        """The whole container."""
        super().thaw()
        if (engine := self.engine) is not None and engine.process.is_frozen:
            engine.process.thaw()

    def _bury(self, process: Process) -> None:
        if self.service is not None:
            engine: Any = self.service._keeper.engine
            engine.process.kill()
        super()._bury(process)


class CoordinatorNode(Node[CoordinatorService]):
    """A coordinator. Each life has a name of its own, unless it is configured."""

    def __init__(
        self, network: Network, number: int, targets: int, drafts: int, *, keeps_name: bool, options: dict[str, Any]
    ) -> None:
        super().__init__(network, f"coordinator-{number}")
        self._keeps_name = keeps_name
        self._options = {
            "host": "127.0.0.1",
            "metrics_port": None,
            "targets": tuple(address_of(f"target-{i + 1}") for i in range(targets)),
            "drafts": tuple(address_of(f"draft-{i + 1}") for i in range(drafts)),
            "redis_url": "redis://127.0.0.1:6379/0",
            "resume_secret": "a-secret-of-the-tests",
            "discovery_s": 3600.0,
            "reconnect_backoff_max_s": 0.5,
            "target_timeout_s": 8.0,
            "session_stall_s": 2.0,
            "journal_lease_s": 2.0,
            "credit_window_tokens": 8,
            "queue_timeout_s": 20.0,
            "reader_stall_s": 20.0,
            **options,
        }

    def _make_service(self) -> CoordinatorService:
        owner_id = self.name if self._keeps_name else f"{self.name}.{self.num_lives}"
        return CoordinatorService(
            CoordinatorSettings(owner_id=owner_id, **self._options), CollectorRegistry(), _TIMINGS
        )
