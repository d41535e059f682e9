"""A coordinator of a fleet: its own admission, quotas, router and ejections, on a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field

import numpy as np

from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.line import Claim
from specdec.coordinator.intake.load_shedding import LoadShedding
from specdec.coordinator.links.link_events import LinkState
from specdec.coordinator.replicas.load import usable
from specdec.coordinator.replicas.outliers import EjectionSettings, OutlierDetector, Standing
from specdec.coordinator.replicas.prefix_map import SharedPrefixes
from specdec.coordinator.replicas.router import PrefixRouter
from specdec.coordinator.tenants.quotas import Allowance, TenantLimits, TokenQuotas
from specdec.coordinator.timings import Timings
from specdec.plan.simulation.clock import SimulatedLoop
from specdec.plan.simulation.pair import RESENT_S
from specdec.plan.simulation.tally import RunTally
from specdec.plan.simulation.target import SimulatedTarget, Stream, TargetLost
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.errors import NoTarget
from specdec.wire.rendezvous import word

_STATES = {
    Standing.TRUSTED: LinkState.READY,
    Standing.EJECTED: LinkState.EJECTED,
    Standing.PROBATION: LinkState.PROBATION,
}
_DIGEST_BYTES = 16
_EXPECTED_OUTPUT_TOKENS = 256
"""Output tokens that admission expects of a request, at most (`coordinator/intake/planning.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Settings by the names that the service has; times in seconds."""

    max_running: int = 64
    max_waiting: int = 256
    queue_timeout_s: float = 30.0
    shed_after_s: float | None = 2.0
    target_timeout_s: float = 30.0
    reconnect_backoff_max_s: float = 5.0
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    """By tenant; others have no limits."""
    hop_s: float = 0.0005
    """A message between coordinator and target, one way."""
    open_s: float = 0.0
    """Processor seconds of a request apart from its verdicts; a process has one core, so requests begin in turn."""
    loss: float = 0.0
    """Share of openings whose packet is lost and sent again."""


class TargetView:
    """A target as one coordinator knows it: what its link has, for the choice among targets."""

    __slots__ = ("_own", "_own_at_load", "_refused_s", "_seen_report", "_standing", "lost_life", "target")

    def __init__(self, target: SimulatedTarget, standing: Callable[[str], Standing]) -> None:
        self.target = target
        self.lost_life = -1
        """The target's last life of which the end was noted."""
        self._refused_s: float | None = None
        self._own: set[Stream] = set()
        self._own_at_load = 0
        self._seen_report = -1
        self._standing = standing

    @property
    def sessions(self) -> Sized:
        """Our sessions there."""
        return self._own

    @property
    def load(self) -> pb.LoadReport | None:
        """Its last report."""
        return self.target.load if self.target.is_up else None

    @property
    def num_own_at_load(self) -> int:
        """Our sessions there when that came."""
        return self._own_at_load if self._seen_report == self.target.report_number else len(self._own)

    @property
    def refused_s(self) -> float | None:
        """When it last said that it is full; None: not since its last report."""
        return self._refused_s if self._seen_report == self.target.report_number else None

    @property
    def holder(self) -> str:
        """Name of its prefix cache."""
        return self.target.holder

    @property
    def state(self) -> LinkState:
        """State of the stream, and the target's standing."""
        if not self.target.is_up:
            return LinkState.DOWN
        return LinkState.DRAINING if self.target.is_draining else _STATES[self._standing(self.target.name)]

    @property
    def is_ready(self) -> bool:
        """New sessions may be opened."""
        return self.state is LinkState.READY

    def add(self, stream: Stream) -> None:
        """A stream is sent there."""
        self._note_report()
        self._own.add(stream)

    def remove(self, stream: Stream) -> None:
        """A stream is there no more."""
        self._note_report()
        self._own.discard(stream)

    def refused(self, now_s: float) -> None:
        """It did not take a stream."""
        self._note_report()
        self._refused_s = now_s

    def _note_report(self) -> None:
        if self._seen_report != self.target.report_number:
            self._seen_report, self._own_at_load, self._refused_s = self.target.report_number, len(self._own), None


class SimulatedCoordinator:
    """One process. `serve` is run as a task for each request."""

    def __init__(
        self,
        name: str,
        zone: str,
        loop: SimulatedLoop,
        settings: CoordinatorSettings,
        targets: Sequence[SimulatedTarget],
        tally: RunTally,
        rng: np.random.Generator,
        quotas: TokenQuotas,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """`targets`: those with links at first. `quotas`, `prefixes`: of all coordinators, as Redis has them."""
        self.name, self.zone = name, zone
        self.word = word(name.encode())
        self.is_up = True
        self._loop = loop
        self._settings = settings
        self._tally = tally
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        timings = Timings()
        self._backoff = Backoff(
            timings.reconnect_first_s, settings.reconnect_backoff_max_s, timings.retry_spread, self._rng.uniform
        )
        self._ejections = OutlierDetector(
            EjectionSettings(first_s=timings.ejection_s, most_s=timings.ejection_max_s), clock=loop.time
        )
        self._views: list[TargetView] = []
        self.attach(targets)
        self._router = PrefixRouter(shared=prefixes)
        self._shedding = LoadShedding(settings.shed_after_s, clock=loop.time)
        self._limits = TenantLimits(quotas)
        self._number = 0
        self._core = asyncio.Lock()
        self.admission = AdmissionQueue(
            settings.max_running,
            settings.max_waiting,
            settings.queue_timeout_s,
            on_change=lambda _, num_waiting: self._shedding.on_queue(num_waiting),
            capacity=self._capacity,
            clock=loop.time,
        )

    @property
    def num_running(self) -> int:
        """Requests that wait or run."""
        return len(self._tasks)

    def attach(self, targets: Sequence[SimulatedTarget]) -> None:
        """Have links to these targets and no others; streams go on where they are."""
        views = {view.target.name: view for view in self._views}
        self._views = [views.get(each.name) or TargetView(each, self._ejections.standing) for each in targets]

    def start(self, stream: Stream) -> asyncio.Task[None]:
        """Serve a stream. The task raises Overloaded, NoTarget, or CancelledError if this process ends."""
        task = self._loop.create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self) -> None:
        """The process ends at once."""
        self.is_up = False
        for task in list(self._tasks):
            task.cancel()

    def begin(self) -> None:
        """It is there again."""
        self.is_up = True

    async def _serve(self, stream: Stream) -> None:
        request, settings = stream.request, self._settings
        allowance = settings.allowances.get(request.tenant, Allowance())
        self._number += 1
        request_id = f"{self.name}-{self._number}"
        if settings.open_s:
            async with self._core:
                await asyncio.sleep(settings.open_s)
        with self._limits.lease(request.tenant, request_id, allowance) as lease:
            await lease.take_prompt(request.prompt_tokens)
            claim = Claim(
                tenant=request.tenant,
                work=float(request.prompt_tokens + min(request.output_tokens, _EXPECTED_OUTPUT_TOKENS)),
                is_divisible=True,
                weight=allowance.weight,
            )
            came_s = self._loop.time()
            place = await self.admission.acquire(claim)
            self._tally.queued.add_one(self._loop.time() - came_s)
            before = stream.produced
            try:
                lease.begin()
                if self._shedding.is_shedding:
                    stream.speculates = False
                await self._decode(stream)
                lease.charge(stream.produced - before)
            finally:
                place.release(float(request.prompt_tokens + stream.produced - before))

    async def _decode(self, stream: Stream) -> None:
        """Open the stream at targets, one after the other, until it has ended. Raises NoTarget."""
        num_failures, since_s = 0, self._loop.time()
        digests = [block.to_bytes(_DIGEST_BYTES, "big", signed=True) for block in stream.request.prefix]
        while stream.left:
            links = usable(self._views)
            opened = False
            if links:
                told = await self._router.ask_others(digests, [link.holder for link in links])
                view = self._router.pick_link(links, digests, self._loop.time(), told)
                opened = await self._at(view, stream, digests)
            if opened:
                num_failures, since_s = 0, self._loop.time()
                continue
            num_failures += 1
            wait_s = self._backoff.wait_s(num_failures)
            if self._loop.time() + wait_s - since_s > self._settings.target_timeout_s:
                raise NoTarget(f"no target took the stream within {self._settings.target_timeout_s:g} s")
            await asyncio.sleep(wait_s)

    async def _at(self, view: TargetView, stream: Stream, digests: Sequence[bytes]) -> bool:
        """Run the stream at a target until it ends there; False: the target did not take it."""
        settings, target = self._settings, view.target
        view.add(stream)
        try:
            is_lost = settings.loss > 0 and self._rng.random() < settings.loss
            await asyncio.sleep(settings.hop_s + RESENT_S * is_lost)
            stream.done = self._loop.create_future()
            if not target.open(stream):
                view.refused(self._loop.time())
                return False
            await stream.done
            self._ejections.succeeded(target.name)
            self._router.remember(digests, view.holder)
        except TargetLost:
            self._tally.num_moved += 1
            if view.lost_life != target.generation:
                view.lost_life = target.generation
                self._ejections.failed(target.name, sum(other is not view and other.is_ready for other in self._views))
        finally:
            view.remove(stream)
            if stream.done is not None and not (stream.done.done() and not stream.done.cancelled()):
                target.abandon(stream)
            stream.done = None
        return True

    def _capacity(self) -> int | None:
        ready = (view.target for view in self._views if view.target.is_up and not view.target.is_draining)
        told = [target.load.max_sessions for target in ready]
        return sum(told) if told else None
