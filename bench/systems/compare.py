"""All systems in one alternating run: same weights, prompts, cores, dtype and numbers of tokens.

All systems run every group of prompts, one right after the other, in an order that is rotated by one place and reversed
from group to group; nothing else runs meanwhile. Figures are medians with quartiles, and ratios are of runs of the same
group. Greedy tokens must be those of the reference, which is this system without speculation. A first difference counts
as a near-tie, decided by rounding, if the two tokens have the reference's two best logits and these differ by less than
`NEAR_TIES`. Any other difference makes the row void.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import psutil

from bench.plan import BenchPlan
from bench.prompts import Prompt, held_out_prompts
from bench.systems import llama_cpp, served, transformers_peer, vllm
from bench.systems.system import LeftOut, Outcome, System
from specdec.client import Client
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.requests import Sampling, make_request
from specdec.commands.measuring.summary import spread
from specdec.commands.measuring.svg import PlotPoint, bars
from specdec.commands.measuring.tables import Table

NEAR_TIES = {"cpu": 1e-4, "cuda": 0.25}
"""Difference of logits below which rounding may decide, by device; bfloat16 logits from 16 on are 0.125 apart."""
REFERENCE = served.PLAIN
_TUNE_PROMPTS, _TUNE_TOKENS = 2, 48
_IDLE_S = 2.0
_PEERS = ("transformers", "llama.cpp", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """First place at which a system's tokens differ from the reference's."""

    prompt: int
    position: int
    gap: float
    """Difference of the reference's two best logits there; infinite where the system's token is neither."""


@dataclass(slots=True)
class SystemRow:
    """Outcomes of one system for all groups of one case."""

    system: System
    outcomes: list[Outcome] = field(default_factory=list)
    differences: list[TokenDifference] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second, in the order of the groups."""
        return [outcome.tokens_per_s for outcome in self.outcomes]

    def verdict(self, temperature: float, verify_mode: str, device: str = "cpu") -> str:
        """Text that says whether the system's tokens are the reference's."""
        name = self.system.name
        is_coupled = verify_mode == "coupled" and name.startswith("specdec")
        if temperature > 0 and not is_coupled:
            return "sampled on its own"
        if not self.differences:
            return "equal"
        largest = max(difference.gap for difference in self.differences)
        if temperature > 0 and device != "cpu":
            return f"equal but for {len(self.differences)} places, where rounding may have decided"
        if largest < NEAR_TIES[device]:
            return f"equal but for {len(self.differences)} near-ties, gap at most {largest:.0e}"
        worst = next(difference for difference in self.differences if difference.gap == largest)
        return f"VOID: differs at token {worst.position} of prompt {worst.prompt}, gap {largest:.2g}"


def run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure every temperature and batch size with every available system."""
    progress.part("systems")
    asyncio.run(_run(plan, report, progress))


async def _run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    left_out: list[str] = []
    found: list[dict[str, object]] = []
    tables, plots = [], {}
    async with AsyncExitStack() as stack:
        systems = await _start(plan, stack, progress, left_out)
        reference = next(system for system in systems if isinstance(system, served.Served) and system.name == REFERENCE)
        tuned = {}
        prompts = held_out_prompts(plan.pair.target.folder, _TUNE_PROMPTS)
        for system in list(systems):
            progress.tell(f"tuning {system.name}")
            try:
                tuned[system.name] = dict(await system.tune(prompts, min(_TUNE_TOKENS, plan.max_tokens)))
            except LeftOut as reason:
                left_out.append(str(reason))
                systems.remove(system)
        idle_cores = await _idle_cores()
        prompts = await lasting_prompts(plan, reference)
        for temperature, batch in itertools.product(plan.temperatures, plan.batches):
            sampling = dataclasses.replace(plan.sampling, temperature=temperature)
            asked = prompts[: max(plan.num_prompts, batch)]
            able = [system for system in systems if system.can_run(batch, temperature)]
            rows = await _alternate(plan, able, asked, sampling, batch, progress, left_out)
            if sampling.is_reproducible:
                await _compare_tokens(rows, reference.address, asked, batch, temperature)
            case = [_result(row, rows, sampling, plan.device) for row in rows]
            found.append({"temperature": temperature, "batch": batch, "rows": case})
            title = f"{plan.label}, temperature {temperature:g}, {batch} at once"
            tables.append(_table(title, case, left_out))
            plots[f"systems-t{temperature:g}-b{batch}"] = _plot(title, case, plan)
    result = {"cases": found, "tuning": tuned, "left_out": left_out, "idle_cores": idle_cores,
              "deployments": {name: d.settings for name, d in served.deployments(plan).items()}}  # fmt: skip
    report.add("systems", result, tables, plots)


async def _start(plan: BenchPlan, stack: AsyncExitStack, progress: Progress, left_out: list[str]) -> list[System]:
    """Start the wanted systems that are available; the deployment with the reference is always started."""
    systems: list[System] = []
    for name in served.deployments(plan):
        if name == served.SPECULATION or _wanted(plan, name):
            systems += served.start(plan, name, stack, progress)
    for peer in _PEERS:
        if not _wanted(plan, peer):
            continue
        try:
            match peer:
                case "transformers":
                    systems += await transformers_peer.start(plan, stack, progress)
                case "llama.cpp":
                    systems += llama_cpp.start(plan, stack, progress)
                case "vllm":
                    systems += vllm.start(plan, stack, progress)
        except LeftOut as reason:
            left_out.append(str(reason))
    return systems


async def _idle_cores() -> float:
    """Cores that all idle systems together keep busy."""

    def spent_s() -> float:
        total = 0.0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    before_s = spent_s()
    await asyncio.sleep(_IDLE_S)
    return (spent_s() - before_s) / _IDLE_S


async def lasting_prompts(plan: BenchPlan, reference: System) -> list[Prompt]:
    """Held-out prompts whose greedy answers do not end before `max_tokens`: not every system can decode past the end.

    All prompts where too few last, so that such a system is left out.
    """
    wanted = max(plan.num_prompts, *plan.batches)
    offered = held_out_prompts(plan.pair.target.folder, wanted * 3)
    sampling = Sampling(max_tokens=plan.max_tokens, stop_at_eos=True)
    lasting = []
    for prompt in dict.fromkeys(offered):
        answer = await reference.run([prompt], sampling)
        lasting += [prompt] if len(answer.token_ids[0]) == plan.max_tokens else []
        if len(lasting) == wanted:
            return lasting
    return offered[:wanted]


def _wanted(plan: BenchPlan, name: str) -> bool:
    return not plan.systems or any(name.startswith(wanted) for wanted in plan.systems)


async def _alternate(
    plan: BenchPlan,
    systems: Sequence[System],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    batch: int,
    progress: Progress,
    left_out: list[str],
) -> list[SystemRow]:
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    rows = [SystemRow(system) for system in systems]
    turns = list(itertools.product(range(plan.repeats), groups))
    for turn, (_, group) in enumerate(turns):
        first = turn % len(rows)
        order = [*rows[first:], *rows[:first]]
        for row in order if turn % 2 == 0 else reversed(order):
            progress.tell(
                f"temperature {sampling.temperature:g}, {batch} at once: "
                f"turn {turn + 1} of {len(turns)}, {row.system.name}"
            )
            if len(row.outcomes) < turn:
                continue  # it failed in an earlier turn
            try:
                row.outcomes.append(await row.system.run(group, sampling))
            except LeftOut as reason:
                left_out.append(str(reason))
    return [row for row in rows if len(row.outcomes) == len(turns)]


async def _compare_tokens(
    rows: Sequence[SystemRow], address: str, prompts: Sequence[Prompt], batch: int, temperature: float
) -> None:
    """Find every row's differences from the reference. Sampled tokens are compared for this system only."""
    reference = next(row for row in rows if row.system.name == REFERENCE)
    for row in rows:
        if temperature > 0 and not row.system.name.startswith("specdec"):
            continue
        seen: set[tuple[int, int]] = set()
        for number, (ours, theirs) in enumerate(zip(reference.outcomes, row.outcomes, strict=True)):
            first = number % max(1, len(prompts) // batch) * batch
            for index, (expected, actual) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
                position = _first_difference(expected, actual)
                if position is None or (first + index, position) in seen:
                    continue
                seen.add((first + index, position))
                gap = float("inf")
                if temperature == 0:
                    context = (*prompts[first + index], *expected[:position])
                    gap = await _gap(address, context, {expected[position], actual[position]})
                row.differences.append(TokenDifference(prompt=first + index, position=position, gap=gap))


def _first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    return next((i for i, (one, other) in enumerate(zip(expected, actual, strict=True)) if one != other), None)


async def _gap(address: str, context: Prompt, tokens: set[int]) -> float:
    """Difference of the reference's two best logits after a context; infinite unless `tokens` have them."""
    request = make_request(context, Sampling(max_tokens=1), 0, speculate=False)
    request.sampling.logprobs = 2
    async with Client(address) as client:
        token = (await client.complete(request)).choices[0].tokens[0]
    best = sorted(((top.logprob, top.token_id) for top in token.logprobs.top), reverse=True)[:2]
    return best[0][0] - best[1][0] if {token_id for _, token_id in best} == tokens else float("inf")


def _result(row: SystemRow, rows: Sequence[SystemRow], sampling: Sampling, device: str) -> dict[str, object]:
    speeds = {other.system.name: other.speeds for other in rows}
    ratios = {
        f"over_{label}": spread([a / b for a, b in zip(row.speeds, speeds[name], strict=True)])
        for label, name in (("plain", REFERENCE), ("plain_all_cores", served.ALL_CORES))
        if name in speeds
    }
    return {
        "system": row.system.name,
        "setting": row.system.setting,
        "tokens_per_s": spread(row.speeds),
        **ratios,
        "tokens": row.verdict(sampling.temperature, sampling.verify_mode or "coupled", device),
        "differences": [dataclasses.asdict(difference) for difference in row.differences],
    }


def _table(title: str, case: Sequence[Mapping[str, object]], left_out: Sequence[str]) -> Table:
    table = Table(title, ["system", "setting", "tokens/s", "over plain", "over plain, all cores", "tokens"])
    for row in case:
        table.add(
            *(row.get(name) for name in ("system", "setting", "tokens_per_s", "over_plain", "over_plain_all_cores")),
            row["tokens"],
        )
    table.notes += [f"Left out: {reason}." for reason in left_out]
    return table


def _plot(title: str, case: Sequence[Mapping[str, object]], plan: BenchPlan) -> str:
    points = {}
    for row in case:
        speed = row["tokens_per_s"]
        if isinstance(speed, Mapping) and not str(row["tokens"]).startswith("VOID"):
            drafted = f", {row['setting']}" if str(row["setting"]).startswith("k =") else ""
            points[f"{row['system']}{drafted}"] = PlotPoint.of(0, speed)
    return bars(
        f"Tokens per second: {title}",
        f"{plan.pair.caption}; {len(plan.cores)} cores; medians, quartiles",
        "tokens/s",
        points,
    )
