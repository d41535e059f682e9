"""Real runs: deployments on this machine, which get requests at once, in bursts and by Poisson."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.calibration.inputs import Inputs
from bench.delay_proxy import DelayProxy
from bench.deployment import MeasuredDeployment, client_cores, running
from bench.plan import BenchPlan
from bench.prompts import held_out_prompts
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import make_request, new_tenant
from specdec.commands.measuring.streams import Stream, open_loop
from specdec.commands.measuring.summary import percentiles
from specdec.commands.up.cluster import Cluster
from specdec.plan.inputs.traffic import Lengths, Rate
from specdec.plan.simulation.pair import Speculation

MOST_AT_ONCE = 32
SPECULATION = (Speculation.ADAPTIVE, Speculation.OFF)
_AT_ONCE = (1, 2, 4, 8, 16, MOST_AT_ONCE)
_LEAST_REQUESTS = 16
"""Requests of a load: few at once are offered several times, each time others."""
_RATES = (("Poisson", 0.3, 1.0), ("Poisson", 0.6, 1.0), ("bursts", 0.4, 0.2))
"""Name, rate over what plain decoding with eight at once serves, and shape of the gaps' gamma distribution."""
_LATE_S = 60.0


@dataclass(frozen=True, slots=True)
class Setup:
    """A deployment that is compared."""

    name: str
    num_targets: int = 1
    delay_s: float = 0.0


SETUPS = (Setup("one target"), Setup("draft 5 ms away", delay_s=0.005), Setup("two targets", 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """A load with one kind of speculation: its requests as they were, and their figures."""

    setup: str
    load: str
    speculation: str
    parts: Sequence[Sequence[tuple[float, int, int]]]
    """Requests of each part by arrival: time, tokens of the prompt that were not cached, output tokens."""
    figures: Sequence[float]
    """Tokens per second; then seconds: TTFT p50 and p99, ITL p50 and p99."""


@contextlib.contextmanager
def deployed(setup: Setup, plan: BenchPlan, progress: Progress) -> Iterator[Cluster]:
    """Run a setup's deployment, warmed up."""
    deployment = MeasuredDeployment(
        pair=plan.pair,
        cores=plan.cores,
        device=plan.device,
        most_tokens=MOST_AT_ONCE * (plan.max_tokens + 512),
        num_targets=setup.num_targets,
    )
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(DelayProxy(client_cores(plan.cores))) if setup.delay_s else None
        cluster = stack.enter_context(running(deployment, progress, proxy))
        if proxy is not None:
            proxy.delay(1e3 * setup.delay_s)
        for speculation in SPECULATION:
            for num in (1, 8):
                asyncio.run(_offer(cluster.address, plan, [0.0] * num, speculation))
        yield cluster


def real_runs(setup: Setup, address: str, plan: BenchPlan, inputs: Inputs, progress: Progress) -> Iterator[RealRun]:
    """Offer every load with and without speculation, in alternating order."""
    for number, (load, parts) in enumerate(_loads(plan, inputs)):
        for speculation in SPECULATION[:: -1 if number % 2 else 1]:
            progress.tell(f"{setup.name}, {load}, speculation {speculation}")
            offered = [
                (times_s, *asyncio.run(_offer(address, plan, times_s, speculation, number * len(times_s))))
                for number, times_s in enumerate(parts)
            ]
            yield RealRun(
                setup=setup.name,
                load=load,
                speculation=str(speculation),
                parts=[_requests(times_s, streams) for times_s, streams, _ in offered],
                figures=_figures([(streams, start_s) for _, streams, start_s in offered]),
            )


def _loads(plan: BenchPlan, inputs: Inputs) -> list[tuple[str, list[list[float]]]]:
    """Each load's parts, which run one after the other, as times of arrival."""
    loads = [(f"{num} at once", [[0.0] * num] * max(1, _LEAST_REQUESTS // num)) for num in _AT_ONCE]
    most_per_s = 8 / (inputs.target.seconds(8, 8) * plan.max_tokens)
    for name, share, shape in _RATES:
        rate = share * most_per_s
        traffic = Rate(per_s=rate, prompts=Lengths(1), outputs=Lengths(1), burstiness=shape)
        times_s = [each.at_s for each in traffic.arrivals(plan.seconds, 7)] or [0.0]
        loads.append((f"{name}, {rate:.2g}/s", [times_s]))
    return loads


async def _offer(
    address: str, plan: BenchPlan, times_s: Sequence[float], speculation: Speculation, first: int = 0
) -> tuple[list[Stream], float]:
    prompts = held_out_prompts(plan.pair.target.folder, first + len(times_s))[first:]
    sampling = dataclasses.replace(plan.sampling, temperature=plan.temperatures[0])
    speculate = speculation is not Speculation.OFF
    requests = [make_request(prompt, sampling, seed, speculate=speculate) for seed, prompt in enumerate(prompts)]
    streams: list[Stream] = []
    async with new_tenant(address) as client:
        start_s = await open_loop(client, requests, times_s, _LATE_S, streams)
    return streams, start_s


def _requests(times_s: Sequence[float], streams: Sequence[Stream]) -> list[tuple[float, int, int]]:
    found = []
    for at_s, stream in zip(times_s, streams, strict=True):
        if stream.finished is not None:
            usage = stream.finished.usage
            found.append((at_s, max(1, usage.prompt_tokens - usage.cached_tokens), max(1, stream.num_tokens)))
    return found


def _figures(parts: Sequence[tuple[Sequence[Stream], float]]) -> list[float]:
    took_s = sum(max((each.ended_s or 0.0) - start_s for each in streams) for streams, start_s in parts)
    ended = [stream for streams, _ in parts for stream in streams if stream.ended_s is not None]
    first = percentiles([stream.first_s for stream in ended if stream.first_s is not None])
    between = percentiles([gap for stream in ended for gap in stream.gaps_s])
    times_s = [figures.get(part, 0.0) for figures in (first, between) for part in ("p50", "p99")]
    return [sum(stream.num_tokens for stream in ended) / took_s, *times_s]
