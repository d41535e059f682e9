"""A deployment in one process: coordinators, targets, drafts, clients, a store, a network, and a clock."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from specdec.replica.bridge.frame_codec import Frame
from specdec.store.guarded import GuardedStore
from tests.protocol.simulation import model
from tests.protocol.simulation.channel import SimulatedReplicaChannel
from tests.protocol.simulation.engine_process import SimulatedEngine
from tests.protocol.simulation.jobs import Ask, ClientNode, Job
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.nodes import CoordinatorNode, Node, ReplicaNode, address_of
from tests.protocol.simulation.seams import Seams
from tests.protocol.simulation.shared_store import SharedStore, StoreClient
from tests.protocol.simulation.virtual_loop import VirtualLoop, current_process

_WARNINGS = ("warning", "error", "critical", "exception")


@dataclass(frozen=True, slots=True)
class Shape:
    """How many there are of each, and how coordinators are set up."""

    coordinators: int = 2
    targets: int = 2
    drafts: int = 2
    clients: int = 4
    keeps_names: bool = False
    """A coordinator that is started again has the name that it had before."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of coordinators that differ."""


class World:
    """Everything. Time passes in `run` only."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        """Start all nodes; nothing has happened yet."""
        self.shape = shape or Shape()
        self.rng = random.Random(seed)
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self.rng)
        self.store = SharedStore(self.loop)
        self.log: list[tuple[str, str, dict[str, Any]]] = []
        """What living processes logged as a warning, or worse."""
        self.on_turn_of_engine: Callable[[SimulatedEngine, list[Frame], list[Frame]], None] = lambda *_: None
        """Told what an engine took and what it sent."""
        self.on_token: Callable[[Job], None] = lambda job: None
        """Told when a client has got something."""
        self._num_engines = 0
        self.seams = Seams(
            self.loop,
            self.rng,
            open_channel=lambda address, settings, files=None: SimulatedReplicaChannel(self.network, address),
            open_store=self._open_store,
            make_engine=self._make_engine,
        )
        shape = self.shape
        self.targets = [ReplicaNode(self.network, "target", i + 1) for i in range(shape.targets)]
        targets = tuple(address_of(node.name) for node in self.targets)
        self.drafts = [ReplicaNode(self.network, "draft", i + 1, targets) for i in range(shape.drafts)]
        self.coordinators = [
            CoordinatorNode(
                self.network,
                i + 1,
                shape.targets,
                shape.drafts,
                keeps_name=shape.keeps_names,
                options=shape.options,
            )
            for i in range(shape.coordinators)
        ]
        addresses = [address_of(node.name) for node in self.coordinators]
        self.clients = [ClientNode(self.network, i + 1, addresses) for i in range(shape.clients)]
        self.jobs: list[Job] = []
        self._replicas = {node.name: node for node in (*self.targets, *self.drafts)}
        with self._in_place():
            for node in self.nodes:
                node.start()

    @property
    def nodes(self) -> list[Node[Any]]:
        """All but the clients."""
        return [*self.targets, *self.drafts, *self.coordinators]

    @property
    def replicas(self) -> list[ReplicaNode]:
        """Targets, then drafts."""
        return [*self.targets, *self.drafts]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with self.seams.in_place():
            structlog.configure(processors=[self._note_log], cache_logger_on_first_use=False)
            yield

    def run(self, duration_s: float) -> None:
        """Let time pass."""
        with self._in_place():
            self.loop.run_for(duration_s)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """For what happens between two moments."""
        with self._in_place():
            yield

    def submit(self, client: ClientNode, ask: Ask, pause_s: float = 0.0) -> Job:
        """A client sends a request."""
        job = self._job(f"request-{len(self.jobs) + 1}", ask, pause_s)
        with self._in_place():
            client.start(job)
        return job

    def heir_of(self, job: Job) -> Job:
        """The same request with what it has got, for another client."""
        heir = self._job(job.request_id, job.ask, job.pause_s)
        heir.got = copy.deepcopy(job.got)
        heir.was_aborted, heir.num_deaths, heir.num_losses = job.was_aborted, job.num_deaths, job.num_losses
        return heir

    def _job(self, request_id: str, ask: Ask, pause_s: float) -> Job:
        job = Job(request_id, ask, pause_s, on_token=lambda job: self.on_token(job))
        self.jobs.append(job)
        return job

    @staticmethod
    def text_of(token_ids: Sequence[int]) -> str:
        """What a client sees of them."""
        return model.tokenizer().decode(token_ids, skip_special_tokens=True)

    def close(self) -> None:
        """End everything that is left; what it does in its end is not looked at."""
        with self._in_place():
            for process in self.loop.processes:
                process.wind_up()
            for _ in range(100):
                tasks = [task for process in self.loop.processes for task in process.tasks]
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                self.loop.run_for(0.3)
        self.loop.close()

    def _note_log(self, _: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        process = current_process()
        if method in _WARNINGS and (process is None or process.is_alive):
            self.log.append((str(process), method, event))
        raise structlog.DropEvent

    def _open_store(self, settings: Any, observe: Any = None, on_change: Any = None) -> GuardedStore:
        return GuardedStore(StoreClient(self.store), observe, on_change)  # type: ignore[arg-type]

    def _make_engine(self, entry: str, settings: Any, *, on_dial: Any = None, **_: Any) -> Any:
        process = current_process()
        assert process is not None
        node = self._replicas[process.name]
        self._num_engines += 1
        engine = SimulatedEngine(
            node.role, settings, self.loop, f"{node.name}#{self._num_engines}", lambda: node.step_s, on_dial=on_dial
        )
        engine.spy = lambda *told: self.on_turn_of_engine(*told)
        return engine
