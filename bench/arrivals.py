"""Requests that arrive independently of the server's speed (an open loop), with and without speculation.

Poisson arrivals at rising rates, until the server no longer keeps up, and bursts of requests at one moment.
`specdec.commands.measuring.streams` defines TTFT and ITL. Goodput counts requests within both limits: the time to the
first token, and the mean time per later token. It leaves out requests that were refused or had not ended `_LATE_S`
after the last arrival.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from bench.deployment import MeasuredDeployment, running
from bench.plan import BenchPlan
from bench.prompts import held_out_prompts
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.requests import make_request, new_tenant
from specdec.commands.measuring.streams import Stream, open_loop, poisson
from specdec.commands.measuring.summary import percentiles
from specdec.commands.measuring.svg import PlotPoint, lines
from specdec.commands.measuring.tables import Table

FIRST_RATE, GROWTH, MOST_RATES = 0.5, 2.0, 10
"""Requests per second of the first Poisson rate, its growth, and the most rates, where the command line names none."""
_SATURATED = 0.9
"""Ratio of ended to arrived requests per second below which the server is saturated."""
_LATE_S = 20.0
_PROMPT_TOKENS = 512
_MOST_AT_ONCE = 64
_COLUMNS = ("load", "speculation", "req/s offered", "req/s ended", "tokens/s", "goodput req/s", "failed", "TTFT ms p50",
            "p90", "p99", "ITL ms p50", "p90", "p99")  # fmt: skip


async def offer(address: str, plan: BenchPlan, times: Sequence[float], *, speculate: bool) -> dict[str, object]:
    """Send requests at these times, in seconds; returns the figures."""
    prompts = held_out_prompts(plan.pair.target.folder, len(times))
    sampling = dataclasses.replace(plan.sampling, temperature=plan.temperatures[0])
    requests = [make_request(prompt, sampling, seed, speculate=speculate) for seed, prompt in enumerate(prompts)]
    streams: list[Stream] = []
    async with new_tenant(address) as client:
        start_s = await open_loop(client, requests, times, _LATE_S, streams)
    return summarize(streams, start_s, times[-1], plan)


def summarize(streams: Sequence[Stream], start_s: float, last_s: float, plan: BenchPlan) -> dict[str, object]:
    """The figures of one load, whose last request came at `last_s`."""
    ended = [stream for stream in streams if stream.ended_s is not None]
    until_s = max((stream.ended_s or 0.0) - start_s for stream in ended) if ended else last_s + _LATE_S
    good = [stream for stream in ended if _is_good(stream, plan)]
    return {
        "num_requests": len(streams),
        "num_failed": len(streams) - len(ended),
        "offered_per_s": (len(streams) - 1) / last_s if last_s > 0 else None,
        "ended_per_s": len(ended) / until_s,
        "tokens_per_s": sum(stream.num_tokens for stream in streams) / until_s,
        "goodput_per_s": len(good) / until_s,
        "first_token_ms": percentiles([1e3 * s.first_s for s in streams if s.first_s is not None]),
        "inter_token_ms": percentiles([1e3 * gap for stream in streams for gap in stream.gaps_s]),
        "client_lag_ms": percentiles([1e3 * stream.lag_s for stream in streams]),
    }


def _is_good(stream: Stream, plan: BenchPlan) -> bool:
    mean_ms = 1e3 * sum(stream.gaps_s) / len(stream.gaps_s) if stream.gaps_s else 0.0
    first_ms = 1e3 * (stream.first_s or 0.0)
    return first_ms <= plan.first_token_slo_ms and mean_ms <= plan.per_token_slo_ms


def run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure Poisson arrivals and bursts."""
    progress.part("arrivals")
    most_tokens = _MOST_AT_ONCE * (plan.max_tokens + _PROMPT_TOKENS)
    deployment = MeasuredDeployment(
        pair=plan.pair, cores=plan.cores, device=plan.device, most_tokens=most_tokens, placement=plan.placement
    )
    with running(deployment, progress) as cluster:
        rows = asyncio.run(_measure(cluster.address, plan, progress))
    title = f"Arrivals, {plan.label}, temperature {plan.temperatures[0]:g}"
    table = Table(title, _COLUMNS)
    for row in rows:
        spreads = (row["first_token_ms"], row["inter_token_ms"])
        times = [spread.get(part) for spread in spreads if isinstance(spread, dict) for part in ("p50", "p90", "p99")]
        table.add(*(row[key] for key in ("load", "speculation", "offered_per_s", "ended_per_s", "tokens_per_s",
                                         "goodput_per_s", "num_failed")), *times)  # fmt: skip
    table.notes.append(
        f"Goodput: a first token in {plan.first_token_slo_ms:g} ms, then at most {plan.per_token_slo_ms:g} ms a token."
    )
    report.add("arrivals", rows, [table], _plots(rows, plan))


async def _measure(address: str, plan: BenchPlan, progress: Progress) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for speculate in (True, False):
        await offer(address, plan, [0.0, 0.1], speculate=speculate)  # warms up
    rates = plan.rates or tuple(FIRST_RATE * GROWTH**number for number in range(MOST_RATES))
    for number, rate in enumerate(rates):
        times = poisson(rate, plan.seconds, seed=number)
        progress.tell(f"Poisson, {rate:g} requests/s for {plan.seconds:g} s")
        pair = await _both(address, plan, times, f"Poisson {rate:g}/s", number)
        rows += [{"rate": rate, **row} for row in pair]
        if not plan.rates and all(_is_saturated(row) for row in pair):
            break
    for number, count in enumerate(plan.bursts):
        progress.tell(f"burst of {count}")
        rows += await _both(address, plan, [0.0] * count, f"burst of {count}", number)
    return rows


async def _both(
    address: str, plan: BenchPlan, times: Sequence[float], load: str, number: int
) -> list[dict[str, object]]:
    """Offer a load with speculation and without; the order alternates with `number`."""
    found = {s: await offer(address, plan, times, speculate=s) for s in ((True, False), (False, True))[number % 2]}
    return [{"load": load, "speculation": speculate, **found[speculate]} for speculate in (True, False)]


def _is_saturated(row: dict[str, object]) -> bool:
    ended, offered = row["ended_per_s"], row["offered_per_s"]
    return isinstance(ended, float) and isinstance(offered, float) and ended < _SATURATED * offered


def _plots(rows: Sequence[dict[str, object]], plan: BenchPlan) -> dict[str, str]:
    ttft: dict[str, list[PlotPoint]] = {}
    goodput: dict[str, list[PlotPoint]] = {}
    for row in rows:
        rate, spread, good = row.get("rate"), row["first_token_ms"], row["goodput_per_s"]
        if not isinstance(rate, float) or not isinstance(good, float):
            continue
        name = "speculation" if row["speculation"] else "plain"
        goodput.setdefault(name, []).append(PlotPoint(rate, good, good, good))
        for part in ("p50", "p99"):
            if isinstance(spread, dict) and part in spread:
                ttft.setdefault(f"{name}, {part}", []).append(PlotPoint(rate, spread[part], spread[part], spread[part]))
    note = f"{plan.pair.caption}; {len(plan.cores)} cores"
    where = f"{plan.label}, temperature {plan.temperatures[0]:g}"
    x_name = "requests per second, Poisson"
    return {
        "arrivals-ttft": lines(f"Time to first token by load, {where}", note, x_name, "ms", ttft, log_x=True),
        "arrivals-goodput": lines(f"Goodput by load, {where}", note, x_name, "requests/s", goodput, log_x=True),
    }
