"""A fleet in simulated time: traffic, coordinators, targets over nodes and zones, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from specdec.client.resuming import ResumePolicy
from specdec.coordinator.replicas.prefix_map import SharedPrefixes
from specdec.coordinator.replicas.subset import Subset
from specdec.coordinator.tenants.quotas import TokenQuotas
from specdec.plan.inputs.traffic import Arrival
from specdec.plan.simulation.autoscaler import Autoscaler, ScalingRule
from specdec.plan.simulation.clock import SimulatedLoop
from specdec.plan.simulation.coordinator import CoordinatorSettings, SimulatedCoordinator
from specdec.plan.simulation.core import SharedCore
from specdec.plan.simulation.draft_pool import DraftPool, PoolSettings
from specdec.plan.simulation.faults import Event, happen
from specdec.plan.simulation.tally import RunTally
from specdec.plan.simulation.target import SimulatedTarget, Stream, TargetSettings
from specdec.store.memory import MemoryStore
from specdec.wire.abort import told_wait_s
from specdec.wire.errors import NoTarget, Overloaded
from specdec.wire.rendezvous import by_preference, word

_PREFIX_TTL_S = 600.0
"""`prefix_ttl_s`."""
_RESUME_S = 1.0
"""Delay from which a client draws its wait when a coordinator is gone: that told it none."""
_LEAST_RETRY_S = 0.05
_DISCOVERY_S, _REGISTRY_TTL_S = 5.0, 15.0
"""Seconds between looks at the registry, and until who is gone is no longer in it (`discovery_s`, `registry_ttl_s`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A deployment of one model."""

    num_targets: int
    num_coordinators: int
    target: TargetSettings
    coordinator: CoordinatorSettings
    targets_per_node: int = 1
    num_zones: int = 1
    subset_size: int | None = None
    """The coordinators' setting: targets that each has links to on average; None: all."""
    by_chat: bool = True
    """A chat's requests go to one coordinator; else to any."""
    targets_per_core: int = 1
    """Targets that share one processor, as two CPU replicas of a small machine do."""
    drafts: PoolSettings | None = None
    """Drafts on devices of their own; None: none, or the targets' curve has them."""
    scaling: ScalingRule | None = None
    """Rule by which targets come and go; `num_targets` are there at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """How clients behave, and what they want. Times in seconds."""

    retries: int = 2
    """Tries after a refusal, each after the delay that the refusal names, as OpenAI's clients do."""
    first_token_s: float = float("inf")
    """Objective of the first token, of goodput."""
    inter_token_s: float = float("inf")
    """Objective of a request's mean time between tokens."""
    way_s: float = 0.001
    """From client to coordinator and back, by way of a gateway, each."""


@dataclass(slots=True)
class FleetRun:
    """Result of a run."""

    tally: RunTally
    seconds: float
    """Measured ones."""
    busy: float
    """Share of the time in which the targets compute, on average over those that are up at the end."""
    kv_share: float
    """Highest share of a target's KV cache in use, over all looks."""
    most_sessions: int
    """Highest number of sessions of a target, over all looks."""
    mean_sessions: float
    """Sessions of all targets, on average."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Number of targets that are up, by time, where they are scaled."""


class FleetSimulation:
    """One run. `clock` of all parts is the loop's."""

    def __init__(self, plan: FleetPlan, clients: Clients, seed: int) -> None:
        self.env = simpy.Environment()
        self.loop = SimulatedLoop(self.env)
        self.tally = RunTally()
        self._clients = clients
        self._plan = plan
        self._rng = np.random.default_rng([seed, 0])
        self._quotas = TokenQuotas(clock=self.loop.time)
        self._prefixes = None
        if plan.num_coordinators > 1:
            self._prefixes = SharedPrefixes(MemoryStore(clock=self.loop.time), _PREFIX_TTL_S)
        num_cores = -(-plan.num_targets // plan.targets_per_core) if plan.targets_per_core > 1 else 0
        self._cores = [SharedCore(self.env) for _ in range(num_cores)]
        self.drafts = None if plan.drafts is None else DraftPool(plan.drafts, self.env)
        self.targets = [self._target(number, seed) for number in range(plan.num_targets)]
        self.coordinators = [self._coordinator(number, seed) for number in range(plan.num_coordinators)]
        self._subsets = [Subset(plan.subset_size, lambda: float(self.env.now)) for _ in self.coordinators]
        self._looks: list[tuple[float, int, int]] = []
        self._running: set[Stream] = set()
        self._next = 0

    def run(
        self,
        arrivals: Sequence[Arrival],
        seconds: float,
        events: Sequence[Event] = (),
        tail_s: float = 0.0,
        from_s: float = 0.0,
    ) -> FleetRun:
        """Let the requests arrive, and events happen.

        `tail_s`: seconds after the last arrival in which streams may end; `from_s`: when measuring begins. A request
        that waits longer than the first token's objective when the run ends counts with that wait.
        """
        if from_s:
            self.tally.from_s = from_s
        with self.loop.running():
            if self._plan.subset_size is not None:
                self.env.process(self._discover())
            if self._prefixes is not None:
                self.loop.start(self._prefixes.run())
            self.env.process(self._arrive(arrivals))
            self.env.process(self._look(from_s, max(0.1, (seconds - from_s) / 200)))
            for event in events:
                self.env.process(happen(event, self.env, self.targets, self.coordinators, self.drafts))
            scaler = None
            if self._plan.scaling is not None:
                scaler = Autoscaler(self._plan.scaling, self.env, self.targets, self._observed)
                self.env.process(scaler.run())
        self.loop.run(seconds + tail_s)
        now_s = float(self.env.now)
        for stream in self._running:
            if stream.first_s is None and now_s - stream.arrived_s > self._clients.first_token_s:
                self.tally.begun(stream.arrived_s, now_s)
        up = [target for target in self.targets if target.is_up]
        elapsed_s = seconds + tail_s
        found = FleetRun(
            tally=self.tally,
            seconds=elapsed_s - from_s,
            busy=sum(target.busy_s for target in up) / (elapsed_s * max(1, len(up))),
            kv_share=max((share for share, _, _ in self._looks), default=0.0),
            most_sessions=max((most for _, most, _ in self._looks), default=0),
            mean_sessions=sum(total for _, _, total in self._looks) / max(1, len(self._looks)),
            sizes=[] if scaler is None else scaler.sizes,
        )
        self.loop.close()
        return found

    def _target(self, number: int, seed: int) -> SimulatedTarget:
        place, zone = divmod(number, self._plan.num_zones)
        return SimulatedTarget(
            name=f"t{number}",
            node=f"n{zone}-{place // self._plan.targets_per_node}",
            zone=f"z{zone}",
            env=self.env,
            settings=self._plan.target,
            tally=self.tally,
            rng=np.random.default_rng([seed, 1, number]),
            core=self._cores[number // self._plan.targets_per_core] if self._cores else None,
            drafts=self.drafts,
        )

    def _coordinator(self, number: int, seed: int) -> SimulatedCoordinator:
        zone, rng = f"z{number % self._plan.num_zones}", np.random.default_rng([seed, 2, number])
        return SimulatedCoordinator(
            f"c{number}", zone, self.loop, self._plan.coordinator, self.targets, self.tally, rng, self._quotas,
            self._prefixes,
        )  # fmt: skip

    def _discover(self) -> Generator[simpy.Event, Any, None]:
        """Let each coordinator attach to its subset of the targets in the registry, from which who is gone expires."""
        listed_s: dict[str, float] = {}
        names: tuple[list[str], list[str]] | None = None
        while True:
            now_s = float(self.env.now)
            listed_s |= {each.name: now_s for each in self.targets if each.is_up}
            listed_s |= {each.name: now_s for each in self.coordinators if each.is_up}
            known = {name for name, at in listed_s.items() if now_s - at < _REGISTRY_TTL_S}
            targets = {each.name: each for each in self.targets if each.name in known}
            others = [each.name for each in self.coordinators if each.name in known]
            if names != (list(targets), others):
                names = (list(targets), others)
                for coordinator, subset in zip(self.coordinators, self._subsets, strict=True):
                    chosen = subset.chosen(coordinator.name, others, names[0])
                    coordinator.attach([targets[name] for name in chosen])
            yield self.env.timeout(_DISCOVERY_S)

    def _arrive(self, arrivals: Sequence[Arrival]) -> Generator[simpy.Event, Any, None]:
        for arrival in arrivals:
            if arrival.at_s > self.env.now:
                yield self.env.timeout(arrival.at_s - self.env.now)
            self.tally.num_arrived += 1
            self.loop.start(self._request(arrival))

    async def _request(self, request: Arrival) -> None:
        """A client's request with its retries: it ends, is refused or fails."""
        stream = Stream(request, self.loop.time() - self._clients.way_s)
        self._running.add(stream)
        try:
            await self._serve(stream)
        finally:
            self._running.discard(stream)

    async def _serve(self, stream: Stream) -> None:
        clients, tally, request = self._clients, self.tally, stream.request
        num_tries = 0
        await asyncio.sleep(clients.way_s)
        while stream.left:
            coordinator = self._choose(request)
            if coordinator is None:
                tally.failures["no coordinator"] += 1
                return
            try:
                await coordinator.start(stream)
            except Overloaded as error:
                tally.num_refused_calls += 1
                if num_tries == clients.retries:
                    tally.refusals[error.reason] += 1
                    tally.refused_of[request.tenant] += self.loop.time() >= tally.from_s
                    return
                num_tries += 1
                await asyncio.sleep(max(_LEAST_RETRY_S, told_wait_s(error.retry_after_s, self._rng.uniform)))
            except NoTarget as error:
                tally.failures[error.reason] += 1
                return
            except asyncio.CancelledError:
                if coordinator.is_up:  # the run is over
                    raise
                await asyncio.sleep(ResumePolicy().wait_s(_RESUME_S, 1, self._rng.uniform))
        self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        tally, clients = self.tally, self._clients
        tally.num_ended += 1
        tally.last_end_s = self.loop.time()
        if tally.last_end_s < tally.from_s:
            return
        tally.tokens_of[stream.request.tenant] += stream.request.output_tokens
        if stream.first_s is None or stream.last_s is None:
            return
        mean_s = (stream.last_s - stream.first_s) / max(1, stream.request.output_tokens - 1)
        tally.num_good += stream.first_s - stream.arrived_s <= clients.first_token_s and mean_s <= clients.inter_token_s

    def _choose(self, request: Arrival) -> SimulatedCoordinator | None:
        """For a chat the one that its gateway prefers, else the less loaded one of two: one in turn, one at random."""
        up = [coordinator for coordinator in self.coordinators if coordinator.is_up]
        if not up:
            return None
        if request.prefix and self._plan.by_chat:
            begin = request.prefix[: request.num_begin]
            return by_preference(up, word(repr((request.tenant, begin)).encode()))[0]
        self._next += 1
        pair = (up[self._next % len(up)], up[int(self._rng.integers(len(up)))])
        return min(pair, key=lambda each: each.num_running)

    def _observed(self) -> tuple[float, float]:
        """What autoscaling looks at: sessions and requests that wait for one, and percents of KV caches, summed."""
        ready = [target for target in self.targets if target.is_up and not target.is_draining]
        num_waiting = sum(coordinator.admission.num_waiting for coordinator in self.coordinators)
        kv_percents = sum(100 * target.kv_used / target.settings.kv_tokens for target in ready)
        return num_waiting + sum(target.num_sessions for target in ready), kv_percents

    def _look(self, from_s: float, every_s: float) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(from_s)
        while True:
            yield self.env.timeout(every_s)
            up = [target for target in self.targets if target.is_up]
            share = max((target.kv_used / target.settings.kv_tokens for target in up), default=0.0)
            numbers = [target.num_sessions for target in up]
            self._looks.append((share, max(numbers, default=0), sum(numbers)))
