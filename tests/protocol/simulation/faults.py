"""All that can happen to a deployment, each as one action; and how all of it is mended."""

from __future__ import annotations

import contextlib
from typing import Any

from specdec.replica.bridge.engine_watch import EndCause
from specdec.wire.errors import SpecdecError
from tests.protocol.simulation.jobs import Ask, ClientNode, Job, SimulatedClient
from tests.protocol.simulation.nodes import CoordinatorNode, Node, ReplicaNode, address_of
from tests.protocol.simulation.virtual_loop import Process
from tests.protocol.simulation.world import World

_SILENCE_S = 4.0
"""After so long a servicer gives up an engine that does not beat."""
_TWO_DEATHS = 2
_MANY_LOSSES = 4


class Faults:
    """Actions on a world. Each can be taken at any time; what makes no sense then does nothing."""

    def __init__(self, world: World) -> None:
        self.world = world

    # --- clients

    def submit(self, ask: Ask, pause_s: float) -> Job | None:
        """A client that has nothing to do sends a request."""
        free = self._free_clients()
        return self.world.submit(free[0], ask, pause_s) if free else None

    def leave_job(self, job: Job) -> None:
        """A client's connection is gone, and it with it; what it had got is kept."""
        if not job.is_over and job.client is not None:
            with self.world.acting():
                job.client.kill()
            job.client = None

    def resume_job(self, job: Job) -> None:
        """The client that left, or another one, goes on where it was."""
        free = self._free_clients()
        if not job.is_over and job.client is None and free:
            with self.world.acting():
                free[0].start(job)

    def resume_all(self) -> None:
        """All clients that have nothing to do take up what was left."""
        for job in self.world.jobs:
            self.resume_job(job)

    def steal_job(self, job: Job) -> None:
        """Another client takes a request up while the first one still reads it."""
        free = self._free_clients()
        if not job.is_over and job.client is not None and job.got.started is not None and free:
            job.is_superseded = True
            heir = self.world.heir_of(job)
            with self.world.acting():
                free[0].start(heir)

    def abort_job(self, job: Job, node: CoordinatorNode) -> None:
        """Somebody asks a coordinator to end a request."""
        if job.is_over or not node.is_up:
            return
        job.was_aborted = True
        process = Process(self.world.loop, "client-that-aborts")

        async def abort() -> None:
            async with SimulatedClient(self.world.network, [address_of(node.name)]) as client:
                with contextlib.suppress(SpecdecError):
                    await client.abort(job.request_id)

        with self.world.acting():
            process.start(abort(), "abort")

    # --- the network

    def cut(self, first: Node[Any], second: Node[Any], late: Node[Any] | None) -> None:
        """A connection breaks; one end may learn of it late."""
        with self.world.acting():
            num_cut = self.world.network.cut(first.name, second.name, late="" if late is None else late.name)
        if num_cut and "target" in first.name + second.name:
            self._lost()

    def cut_link(self, draft: Node[Any], target: Node[Any]) -> None:
        """A direct link breaks; no target or coordinator is lost with it."""
        with self.world.acting():
            self.world.network.cut(draft.name, target.name)

    def block(self, source: Node[Any], sink: Node[Any]) -> None:
        """Nothing gets through, in one direction."""
        with self.world.acting():
            self.world.network.block(source.name, sink.name)
        self._lost()

    def unblock(self) -> None:
        """The network is whole."""
        with self.world.acting():
            self.world.network.unblock()

    def delay(self, source: Node[Any], sink: Node[Any], delay_s: float) -> None:
        """One direction of a link is slow."""
        self.world.network.delays[source.name, sink.name] = delay_s

    # --- nodes

    def kill(self, node: Node[Any]) -> None:
        """A node dies."""
        if node.is_up:
            with self.world.acting():
                node.kill()
            self._lost()

    def start(self, node: Node[Any]) -> None:
        """A node that is down is started."""
        if not node.is_up:
            with self.world.acting():
                node.start()

    def leave(self, node: Node[Any], drain_s: float) -> None:
        """A node is stopped in order."""
        with self.world.acting():
            node.leave(drain_s)

    def freeze(self, node: Node[Any]) -> None:
        """A node is stopped, and may be thawed."""
        with self.world.acting():
            node.freeze()
        self._lost()

    def thaw(self, node: Node[Any]) -> None:
        """It goes on."""
        with self.world.acting():
            node.thaw()

    def end_engine(self, node: ReplicaNode, cause: EndCause) -> None:
        """An engine ends by itself, or is killed; its servicer starts another one."""
        with self.world.acting():
            node.end_engine(cause)
        if cause in (EndCause.EXITED, EndCause.STUCK) and node.role == "target":
            self._died()
        else:
            self._lost()

    def freeze_engine(self, node: ReplicaNode) -> None:
        """An engine stands still; after a while its servicer gives it up."""
        engine = node.engine
        if engine is None or not engine.is_ready or engine.process.is_frozen:
            return
        engine.process.freeze()

        def give_up() -> None:
            if engine.process.is_frozen:
                engine._servicer.call(engine.end, EndCause.SILENT, "silent")

        with self.world.acting():
            self.world.network.after(_SILENCE_S, give_up)
        self._lost()

    def slow(self, node: ReplicaNode, step_s: float) -> None:
        """Steps take this long."""
        node.step_s = step_s

    # --- the store

    def silence_store(self) -> None:
        """It does nothing and answers nobody."""
        self.world.store.is_silent = True

    def deafen_store(self) -> None:
        """It does what it is asked, but nobody hears of it."""
        self.world.store.is_deaf = True

    def part_from_store(self, node: CoordinatorNode) -> None:
        """One coordinator does not reach it."""
        self.world.store.unreached.add(node.name)

    def mend_store(self) -> None:
        """It answers."""
        self.world.store.is_silent = self.world.store.is_deaf = False
        self.world.store.unreached.clear()

    def empty_store(self) -> None:
        """It has lost its data."""
        self.world.store.lose_data()

    # --- the end of all that

    def mend_all(self) -> None:
        """No fault is left, all nodes are there, and all clients go on."""
        world = self.world
        self.unblock()
        self.mend_store()
        world.network.delays.clear()
        for node in world.nodes:
            self.thaw(node)
            self.start(node)
        for replica in world.replicas:
            replica.step_s = ReplicaNode.STEP_S
            engine = replica.engine
            if engine is not None and engine.process.is_frozen:
                with world.acting():
                    engine.process.thaw()
        self.resume_all()

    def _free_clients(self) -> list[ClientNode]:
        return [client for client in self.world.clients if client.process is None or not client.process.tasks]

    def _died(self) -> None:
        for job in self.world.jobs:
            job.num_deaths += not job.is_over

    def _lost(self) -> None:
        for job in self.world.jobs:
            job.num_losses += not job.is_over


def may_be_quarantined(job: Job) -> bool:
    """Whether so much has died while it ran that it may be taken for the cause."""
    deaths, losses = job.num_deaths, job.num_losses
    return deaths >= _TWO_DEATHS or losses >= _MANY_LOSSES or (deaths > 0 and losses >= _MANY_LOSSES - 1)
