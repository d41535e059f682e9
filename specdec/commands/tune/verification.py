"""Runs the chosen settings and plain decoding in the same deployment, in turns."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.client import ClientSettings
from specdec.commands.errors import ClusterFailed
from specdec.commands.measuring.requests import Sampling
from specdec.commands.measuring.served import Load, LoadPlan, LoadRun, measure, warm_up
from specdec.commands.tune.prediction import Measurements, OutsideSteps, SettingsChoice
from specdec.commands.tune.probe_processes import ProbePlacement, Questions
from specdec.commands.tune.settings_files import role_settings
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.mps import mps_is_wanted, shared_by_mps
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.v1 import coordinator_pb2

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Verified:
    """Measurements of the deployment. Pairs are temperature and requests at once."""

    speedups: Mapping[tuple[float, int], float]
    """Medians of the ratios of neighbouring runs."""
    outside: OutsideSteps
    between_ms: Mapping[tuple[float, int], tuple[float, float]]
    """Milliseconds between steps, with speculation and without."""
    tokens_per_s: Mapping[tuple[float, int], float]
    """Decoding speed of all requests together, with speculation."""


def verify(
    questions: Questions,
    where: ProbePlacement,
    measured: Measurements,
    choice: SettingsChoice,
    repeats: int,
    tell: Callable[[str], None],
    log_dir: Path | None = None,
) -> Verified:
    """Start the deployment of the settings file, and measure. Raises ClusterFailed and `specdec.wire.errors`."""
    settings: dict[str, dict[str, Any]] = role_settings(choice)
    own_cores = {"target": where.target_cores, "draft": where.draft_cores if where.placement == "apart" else ()}
    for role, cores in own_cores.items():
        if cores:
            settings[role] |= {"engine_cores": cores, "num_threads": len(cores)}
    plan = LocalPlan(
        target_model=questions.target_model,
        draft_model=questions.draft_model,
        device=where.target_device.partition(":")[0],
        free_ports=True,
        placement=where.placement,
        target_settings=settings["target"],
        draft_settings=settings["draft"],
        coordinator_settings=settings["coordinator"],
    )
    passes: dict[float, list[LoadRun]] = {temperature: [] for temperature in questions.temperatures}
    sharing = shared_by_mps(plan_services(plan), tell, is_wanted=mps_is_wanted(os.environ))
    with sharing as specs, Cluster(specs, log_dir=log_dir) as cluster:
        cluster.start(lambda what: tell(f"waiting for {what}"))
        for temperature in questions.temperatures:
            sampling = Sampling(temperature=temperature, max_tokens=questions.max_tokens, verify_mode=choice.mode)
            wishes = LoadPlan(
                prompts=questions.prompts,
                sampling=sampling,
                loads=[Load(concurrency=load) for load in questions.loads],
                speculation=(True, False),
                repeats=repeats,
            )
            asyncio.run(_measure(cluster.address, wishes, passes[temperature], tell))
    every = [one for own in passes.values() for one in own]
    points = {
        (temperature, load): [one for one in own if one.load.concurrency == load]
        for (temperature, own), load in itertools.product(passes.items(), questions.loads)
    }
    speedups = {point: ratio for point, own in points.items() if (ratio := decoding_speedup(own)) is not None}
    if not speedups:
        failures = sorted({stream.failure for one in every for stream in one.streams if stream.failure})
        raise ClusterFailed(f"every request of the verifying run failed: {'; '.join(failures) or 'no reason is known'}")
    return Verified(
        speedups=speedups,
        outside=outside_of(every, questions.loads, measured),
        between_ms={
            (temperature, load): (_between_ms(own, load, True), _between_ms(own, load, False))
            for (temperature, load), own in points.items()
        },
        tokens_per_s={point: rate for point, own in points.items() if (rate := _tokens_per_s(own)) is not None},
    )


async def _measure(address: str, wishes: LoadPlan, passes: list[LoadRun], tell: Callable[[str], None]) -> None:
    settings = ClientSettings(timeout_s=_TIMEOUT_S)
    await warm_up(address, settings, wishes)
    await measure(address, settings, wishes, passes, lambda what: tell(f"verifying: {what}"))


def decoding_speedup(passes: Sequence[LoadRun]) -> float | None:
    """Median ratio of the plain run's to the other run's time per token after the first chunk, over pairs of runs."""
    ms = {(one.repeat, one.speculate): _ms_per_token(one) for one in passes}
    ratios = [
        slow / fast
        for (repeat, speculate), fast in ms.items()
        if speculate and fast and (slow := ms.get((repeat, False)))
    ]
    return statistics.median(ratios) if ratios else None


def _ms_per_token(one: LoadRun) -> float | None:
    gaps = [1e3 * gap for stream in one.streams if stream.ended_s is not None for gap in stream.gaps_s]
    return statistics.fmean(gaps) if gaps else None


def _tokens_per_s(passes: Sequence[LoadRun]) -> float | None:
    """Median speed of the passes with speculation."""
    found = [
        1e3 * one.load.concurrency / ms for one in passes if one.speculate and (ms := _ms_per_token(one)) is not None
    ]
    return statistics.median(found) if found else None


def outside_of(passes: Sequence[LoadRun], loads: Sequence[int], measured: Measurements) -> OutsideSteps:
    """What services add to the engines' own times, from runs with speculation and without."""
    drafting_ms = {}
    for load in loads:
        stats = _stats(passes, load, True)
        num_tokens = sum(one.num_proposed for one in stats)
        served_ms = sum(one.draft_ms for one in stats) / max(1, num_tokens)
        drafting_ms[load] = max(0.0, served_ms - measured.draft.of(load, 1))
    return OutsideSteps(
        plain_ms={load: _between_ms(passes, load, False) for load in loads},
        verifying_ms={load: _between_ms(passes, load, True) for load in loads},
        drafting_ms=drafting_ms,
    )


def _stats(passes: Sequence[LoadRun], load: int, speculate: bool) -> list[coordinator_pb2.SpeculationStats]:
    return [
        stream.finished.stats
        for one in passes
        if one.load.concurrency == load and one.speculate is speculate
        for stream in one.streams
        if stream.finished
    ]


def _between_ms(passes: Sequence[LoadRun], load: int, speculate: bool) -> float:
    stats = _stats(passes, load, speculate)
    return sum(one.outside_ms for one in stats) / max(1, sum(one.num_steps for one in stats))


def with_outside(measured: Measurements, verified: Verified) -> Measurements:
    """The measurements with the time outside of steps."""
    return dataclasses.replace(measured, outside=verified.outside)
