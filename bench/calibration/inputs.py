"""What the simulator is given: step times, acceptance, and the services' own time, none of it from compared runs."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bench.plan import BenchPlan
from bench.prompts import held_out_prompts
from specdec.client import ClientSettings
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import make_request, new_tenant
from specdec.commands.measuring.served import Load, LoadPlan, LoadRun, measure
from specdec.commands.measuring.streams import Stream, closed_loop
from specdec.commands.tune.measured import StepTimes, rounds
from specdec.commands.tune.prediction import Measurements, OutsideSteps
from specdec.commands.tune.probe_processes import Questions, measure_pair, places
from specdec.commands.tune.verification import outside_of
from specdec.commands.up.cluster import Cluster
from specdec.plan.inputs.step_times import MeasuredSteps, conditional

LOADS = (1, 8, 32)
"""Sequences whose steps, and the time between these, are measured."""
_NUM_EMPTY = 24
_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Measured inputs, as JSON holds them."""

    target_ms: Mapping[int, Mapping[int, float]]
    draft_ms: Mapping[int, Mapping[int, float]]
    target_prompt_ms: Mapping[int, float]
    draft_prompt_ms: Mapping[int, float]
    acceptance: Sequence[float]
    outside: OutsideSteps
    way_s: float
    """From client to target and back, without the step: of requests for one token."""
    open_s: float
    """Processor seconds of the services' core for such a request."""
    verdict_s: float
    """Processor seconds of the services for a step of one stream with speculation, on the draft's core."""

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Inputs:
        """Inputs whose keys are text."""

        def by_number(values: Mapping[str, Any]) -> dict[int | str, Any]:
            return {
                int(key) if key.isdigit() else key: by_number(value) if isinstance(value, dict) else value
                for key, value in values.items()
            }

        values: dict[Any, Any] = by_number(found)
        return cls(**values | {"outside": OutsideSteps(**values["outside"])})

    @property
    def target(self) -> MeasuredSteps:
        """Steps of the target, with the time between them."""
        return MeasuredSteps(
            _times(self.target_ms), self.outside.plain_ms, self.outside.verifying_ms, self.target_prompt_ms
        )

    @property
    def draft(self) -> MeasuredSteps:
        """Steps of the draft in serving."""
        return MeasuredSteps(_times(self.draft_ms), self.outside.drafting_ms, prompt_ms=self.draft_prompt_ms)


def measure_engines(plan: BenchPlan, progress: Progress) -> Measurements:
    """Both models, each alone on its core."""
    questions = Questions(
        target_model=str(plan.pair.target.folder),
        draft_model=str(plan.pair.draft.folder),
        prompts=held_out_prompts(plan.pair.target.folder, max(LOADS)),
        temperatures=plan.temperatures[:1],
        max_tokens=plan.max_tokens,
        loads=LOADS,
    )
    return measure_pair(questions, places(plan.device), progress.tell)[0]


def measure_services(cluster: Cluster, plan: BenchPlan, measured: Measurements, progress: Progress) -> Inputs:
    """The services' own time in a running deployment, added to what the engines alone gave."""
    progress.tell("requests for one token")
    used_s = _host_s(cluster)
    streams = asyncio.run(_empty_requests(cluster.address, plan))
    open_s = (_host_s(cluster) - used_s) / len(streams)
    whole_s = statistics.median(stream.first_s for stream in streams if stream.first_s is not None)
    passes: list[LoadRun] = []
    wishes = LoadPlan(
        prompts=held_out_prompts(plan.pair.target.folder, max(LOADS)),
        sampling=dataclasses.replace(plan.sampling, temperature=plan.temperatures[0]),
        loads=[Load(concurrency=load) for load in LOADS],
        speculation=(True, False),
        repeats=1,
        num_requests=max(LOADS),
    )
    verdict_s = []
    for load in wishes.loads:
        for speculate in wishes.speculation:
            own = dataclasses.replace(wishes, loads=[load], speculation=(speculate,))
            used_s = _host_s(cluster)
            asyncio.run(measure(cluster.address, ClientSettings(), own, passes, progress.tell))
            stats = [stream.finished.stats for stream in passes[-1].streams if stream.finished]
            if speculate:
                spent_s = _host_s(cluster) - used_s - len(stats) * open_s
                verdict_s.append(max(0.0, spent_s) / max(1, sum(each.num_steps for each in stats)))
    return Inputs(
        target_ms=measured.target.ms,
        draft_ms=measured.draft.ms,
        target_prompt_ms=measured.target_prompt_ms,
        draft_prompt_ms=measured.draft_prompt_ms,
        acceptance=conditional(rounds(measured.outputs[plan.temperatures[0]], "coupled", _DEPTH).survival),
        outside=outside_of(passes, LOADS, measured),
        way_s=max(0.0, whole_s - measured.target.of(1, 1) / 1e3),
        open_s=open_s,
        verdict_s=statistics.median(verdict_s),
    )


async def _empty_requests(address: str, plan: BenchPlan) -> list[Stream]:
    prompt = held_out_prompts(plan.pair.target.folder, 1)[0][:1]
    sampling = dataclasses.replace(plan.sampling, max_tokens=1)
    requests = [make_request(prompt, sampling, seed, speculate=False) for seed in range(_NUM_EMPTY)]
    streams: list[Stream] = []
    async with new_tenant(address) as client:
        await closed_loop(client, requests[:4], 1, [])
        await closed_loop(client, requests, 1, streams)
    return streams


def _host_s(cluster: Cluster) -> float:
    """Processor seconds of the services and this client so far, without the engines."""
    processes = [psutil.Process()]
    for started in cluster.services.values():
        service = psutil.Process(started.pid)
        has_engine = started.spec.role in {"target", "draft"}
        processes += [service, *([] if has_engine else service.children(recursive=True))]
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _times(ms: Mapping[int, Mapping[int, float]]) -> StepTimes:
    return StepTimes({num: dict(rows) for num, rows in ms.items()})
