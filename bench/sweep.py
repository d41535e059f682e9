"""Speculation against plain decoding at each value of one varied parameter.

`SWEEPS` has a function for each parameter, which gives the values with their deployments and requests. Neighbouring
values with equal deployments share one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.decode import Case, measure, warm_up
from bench.delay_proxy import DelayProxy
from bench.deployment import MeasuredDeployment, client_cores, running
from bench.plan import BenchPlan
from bench.prompts import Prompt, held_out_prompts, prompts_of_length
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.requests import Sampling
from specdec.commands.measuring.svg import PlotPoint, lines
from specdec.commands.measuring.tables import Table

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
TEMPERATURES = (0.0, 0.7, 1.0)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
ANSWER_TOKENS = (8, 16, 32, 64, 128)
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
TREE_WIDTHS = ((0, 1), (1, 1), (2, 1), (2, 2), (2, 4), (4, 4), (8, 8))
"""Pairs of num_siblings and max_heads of the draft."""
DRAFT_WEIGHTS = ("none", "int8", "int4")
"""Values of the draft's weight_quantization; only CPUs have it."""
DELAYS_MS = (0.0, 1.0, 5.0, 20.0)
_PROMPT_TOKENS = 512
_COLUMNS = {
    "speedup": "speculation / plain",
    "tokens_per_s": "tokens/s",
    "plain_tokens_per_s": "plain",
    "mean_acceptance_length": "mean acceptance length",
    "hit_rate": "hits",
    "draft_ms_per_step": "draft ms",
    "hold_off_ms_per_step": "hold-off ms",
    "first_verified_token": "first verified token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStep:
    """One value of the varied parameter."""

    label: str
    x: float
    deployment: MeasuredDeployment
    case: Case
    delay_ms: float | None = None
    """One-way delay of all that the draft sends and receives; None: no proxy before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A varied parameter and its values."""

    name: str
    steps: Sequence[SweepStep]
    log_x: bool = False


def _concurrency(plan: BenchPlan) -> Sweep:
    most = CONCURRENCIES[-1]
    deployment = _deployment(plan, most_tokens=most * (_PROMPT_TOKENS + plan.max_tokens))
    steps = []
    for count in CONCURRENCIES:
        prompts = held_out_prompts(plan.pair.target.folder, max(plan.num_prompts, count))
        steps.append(
            SweepStep(label=str(count), x=count, deployment=deployment, case=_case(plan, prompts, batch=count))
        )
    return Sweep(name="requests at once", steps=steps, log_x=True)


def _temperature(plan: BenchPlan) -> Sweep:
    prompts = held_out_prompts(plan.pair.target.folder, plan.num_prompts)
    steps = [
        SweepStep(
            label=f"{value:g}", x=value, deployment=_deployment(plan), case=_case(plan, prompts, temperature=value)
        )
        for value in TEMPERATURES
    ]
    return Sweep(name="temperature", steps=steps)


def _context(plan: BenchPlan) -> Sweep:
    most = plan.pair.max_tokens - plan.max_tokens
    steps = []
    for length in (length for length in CONTEXTS if length <= most):
        prompts = prompts_of_length(plan.pair.target.folder, plan.num_prompts, length)
        deployment = _deployment(plan, most_tokens=2 * CONTEXTS[-1] * plan.num_prompts)
        steps.append(SweepStep(label=str(length), x=length, deployment=deployment, case=_case(plan, prompts)))
    return Sweep(name="tokens in the prompt", steps=steps, log_x=True)


def _answer_length(plan: BenchPlan) -> Sweep:
    prompts = held_out_prompts(plan.pair.target.folder, plan.num_prompts)
    steps = []
    for count in ANSWER_TOKENS:
        case = _case(dataclasses.replace(plan, max_tokens=count), prompts)
        steps.append(SweepStep(label=str(count), x=count, deployment=_deployment(plan), case=case))
    return Sweep(name="tokens of the answer", steps=steps, log_x=True)


def _draft_length(plan: BenchPlan) -> Sweep:
    most = DRAFT_LENGTHS[-1]
    limits = {"max_draft_tokens": most}
    deployment = dataclasses.replace(
        _deployment(plan), target=limits, draft={**limits, "max_ahead_tokens": 2 * most}, coordinator=limits
    )
    prompts = held_out_prompts(plan.pair.target.folder, plan.num_prompts)
    steps = [
        SweepStep(label=str(n), x=n, deployment=deployment, case=_case(plan, prompts, max_draft_tokens=n))
        for n in DRAFT_LENGTHS
    ]
    return Sweep(name="draft tokens per step, at most", steps=steps)


def _tree_width(plan: BenchPlan) -> Sweep:
    prompts = held_out_prompts(plan.pair.target.folder, plan.num_prompts)
    steps = []
    for number, (siblings, heads) in enumerate(TREE_WIDTHS):
        deployment = dataclasses.replace(_deployment(plan), draft={"num_siblings": siblings, "max_heads": heads})
        label = f"{siblings} runners-up, {heads} heads"
        steps.append(SweepStep(label=label, x=number, deployment=deployment, case=_case(plan, prompts)))
    return Sweep(name="tree width (as numbered in the table)", steps=steps)


def _draft_weights(plan: BenchPlan) -> Sweep:
    prompts = held_out_prompts(plan.pair.target.folder, plan.num_prompts)
    steps = []
    for number, name in enumerate(DRAFT_WEIGHTS if plan.device == "cpu" else DRAFT_WEIGHTS[:1]):
        deployment = dataclasses.replace(_deployment(plan), draft={"weight_quantization": name})
        steps.append(SweepStep(label=name, x=number, deployment=deployment, case=_case(plan, prompts)))
    return Sweep(name="weight_quantization of the draft (as numbered in the table)", steps=steps)


def _delay(plan: BenchPlan) -> Sweep:
    prompts = held_out_prompts(plan.pair.target.folder, plan.num_prompts)
    steps = [
        SweepStep(label=f"{ms:g} ms", x=ms, deployment=_deployment(plan), case=_case(plan, prompts), delay_ms=ms)
        for ms in DELAYS_MS
    ]
    return Sweep(name="one-way delay to the draft, ms", steps=steps)


def _cores(plan: BenchPlan) -> Sweep:
    prompts = held_out_prompts(plan.pair.target.folder, plan.num_prompts)
    counts = sorted({*(n for n in (2, 4, 8, 16, 32) if n <= len(plan.cores)), len(plan.cores)})
    steps = []
    for count in counts:
        deployment = dataclasses.replace(_deployment(plan), cores=plan.cores[:count])
        steps.append(SweepStep(label=str(count), x=count, deployment=deployment, case=_case(plan, prompts)))
    return Sweep(name="cores", steps=steps)


SWEEPS: dict[str, Callable[[BenchPlan], Sweep]] = {
    "concurrency": _concurrency,
    "temperature": _temperature,
    "context": _context,
    "answer-length": _answer_length,
    "draft-length": _draft_length,
    "tree-width": _tree_width,
    "draft-weights": _draft_weights,
    "delay": _delay,
    "cores": _cores,
}


def run(names: Sequence[str], plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Run sweeps, each at every temperature of the plan unless it varies that. Raises KeyError for unknown names."""
    results: dict[str, object] = {}
    tables, plots = [], {}
    for name in names:
        progress.part(f"sweep of {name}")
        temperatures = (plan.temperatures[0],) if name == "temperature" else plan.temperatures
        series: dict[str, list[PlotPoint]] = {}
        for temperature in temperatures:
            sweep = SWEEPS[name](dataclasses.replace(plan, temperatures=(temperature,)))
            rows = asyncio.run(_measure(sweep, plan, progress))
            suffix = "" if name == "temperature" else f", temperature {temperature:g}"
            results[f"{name}{suffix}"] = rows
            tables.append(_table(f"{plan.label}: {name}{suffix}", rows))
            for key, label in (("tokens_per_s", "speculation"), ("plain_tokens_per_s", "plain")):
                series[f"{label}{suffix}"] = _points(sweep, rows, key)
        sweep = SWEEPS[name](plan)
        note = f"{plan.pair.caption}; {len(plan.cores)} cores; medians, quartiles"
        plots[f"sweep-{name}"] = lines(
            f"Tokens per second by {name}, {plan.label}", note, sweep.name, "tokens/s", series, log_x=sweep.log_x
        )
    report.add("sweep", results, tables, plots)


async def _measure(sweep: Sweep, plan: BenchPlan, progress: Progress) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    current: MeasuredDeployment | None = None
    async with AsyncExitStack() as stack:
        inner = await stack.enter_async_context(AsyncExitStack())
        address, proxy = "", None
        for step in sweep.steps:
            if step.deployment != current:
                await inner.aclose()
                inner = await stack.enter_async_context(AsyncExitStack())
                has_proxy = step.delay_ms is not None
                proxy = inner.enter_context(DelayProxy(client_cores(plan.cores))) if has_proxy else None
                cluster = inner.enter_context(running(step.deployment, progress, proxy))
                address, current = cluster.address, step.deployment
                await warm_up(address, plan)
            if proxy is not None and step.delay_ms is not None:
                proxy.delay(step.delay_ms)
                await warm_up(address, plan)  # the latencies learnt so far are of another delay
            progress.tell(step.label)
            rows.append({"value": step.label, **await measure(address, step.case, progress)})
    return rows


def _points(sweep: Sweep, rows: Sequence[dict[str, object]], key: str) -> list[PlotPoint]:
    spreads = [row[key] for row in rows]
    pairs = zip(sweep.steps, spreads, strict=True)
    return [PlotPoint.of(step.x, spread) for step, spread in pairs if isinstance(spread, dict)]


def _deployment(plan: BenchPlan, most_tokens: int = 0) -> MeasuredDeployment:
    return MeasuredDeployment(
        pair=plan.pair, cores=plan.cores, device=plan.device, most_tokens=most_tokens, placement=plan.placement
    )


def _case(
    plan: BenchPlan,
    prompts: Sequence[Prompt],
    *,
    batch: int = 1,
    temperature: float | None = None,
    max_draft_tokens: int | None = None,
) -> Case:
    sampling = Sampling(
        temperature=plan.temperatures[0] if temperature is None else temperature,
        max_tokens=plan.max_tokens,
        max_draft_tokens=max_draft_tokens,
        verify_mode=plan.verify_mode,
    )
    return Case(prompts=prompts, sampling=sampling, batch=batch, repeats=plan.repeats, rounds=plan.rounds,
                is_exact=plan.device == "cpu")  # fmt: skip


def _table(title: str, rows: Sequence[dict[str, object]]) -> Table:
    table = Table(title, ["value", *_COLUMNS.values()])
    for row in rows:
        table.add(row["value"], *(row[column] for column in _COLUMNS))
    return table
