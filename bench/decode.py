"""Decoding speed through the whole system, with and without speculation, and where the time of a step goes.

Runs alternate: each prompt (or group of prompts) is decoded with speculation and without, one right after the other, in
an order that flips from repeat to repeat; the figure is the median of the pairwise ratios. Every pair's tokens must be
equal, or the run fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import spread
from specdec.cli.local.cluster import Cluster
from specdec.cli.local.plan import LocalPlan, plan_services, shipped_model
from specdec.client import Client, Completion
from specdec.v1 import coordinator_pb2 as api

PROMPTS = Path(__file__).parents[1] / "models" / "prompts.json"


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    device: str
    num_prompts: int
    max_tokens: int
    repeats: int
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """One group of requests that ran at once."""

    tokens_per_s: float
    completions: list[Completion]

    @property
    def token_ids(self) -> list[list[int]]:
        """Of every request, for the comparison."""
        return [completion.choices[0].token_ids for completion in self.completions]


class TokensDiffer(AssertionError):
    """The same requests gave different tokens with and without speculation."""


def held_out_prompts(count: int) -> list[str]:
    """The first prompts of models/prompts.json, repeated when there are fewer."""
    texts = [entry["text"] for entry in json.loads(PROMPTS.read_text())]
    return list(itertools.islice(itertools.cycle(texts), count))


def run(plan: Plan, console: Console) -> list[dict[str, object]]:
    """Measure every temperature and batch size on the shipped pair; prints a table."""
    services = plan_services(
        LocalPlan(
            target_model=shipped_model("target"),
            draft_model=shipped_model("draft"),
            device=plan.device,
            free_ports=True,
        )
    )
    with Cluster(services) as cluster, console.status("starting the services") as status:
        cluster.start(lambda what: status.update(f"waiting for {what}"))
        rows = asyncio.run(_measure(cluster.address, plan, status.update))
    _print(rows, console)
    return rows


async def _measure(address: str, plan: Plan, progress: object) -> list[dict[str, object]]:
    rows = []
    async with Client(address) as client:
        await _run_group(client, held_out_prompts(2), 0.0, plan.max_tokens, speculate=True)  # warms both engines
        for temperature, batch in itertools.product(plan.temperatures, plan.batches):
            prompts = held_out_prompts(max(plan.num_prompts, batch))
            groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
            pairs: list[tuple[Run, Run]] = []
            for repeat, (index, group) in itertools.product(range(plan.repeats), enumerate(groups)):
                if callable(progress):
                    progress(f"temperature {temperature:g}, {batch} at once: repeat {repeat + 1}, group {index + 1}")
                order = (True, False) if (repeat + index) % 2 == 0 else (False, True)
                runs = {s: await _run_group(client, group, temperature, plan.max_tokens, speculate=s) for s in order}
                if runs[True].token_ids != runs[False].token_ids:
                    raise TokensDiffer(f"temperature {temperature}, group {index}")
                pairs.append((runs[True], runs[False]))
            rows.append(_summary(temperature, batch, pairs))
    return rows


async def _run_group(
    client: Client, prompts: Sequence[str], temperature: float, max_tokens: int, *, speculate: bool
) -> Run:
    requests = []
    for seed, prompt in enumerate(prompts):
        request = api.GenerateRequest(prompt=prompt)
        request.sampling.temperature = temperature
        request.sampling.seed = seed
        request.sampling.max_tokens = max_tokens
        request.sampling.ignore_eos = True
        request.speculation.enabled = speculate
        requests.append(request)
    started_s = time.perf_counter()
    completions = await asyncio.gather(*(client.complete(request) for request in requests))
    if len(prompts) == 1:
        speed = completions[0].tokens_per_second or 0.0
    else:
        speed = sum(completion.num_tokens for completion in completions) / (time.perf_counter() - started_s)
    return Run(speed, list(completions))


def _summary(temperature: float, batch: int, pairs: list[tuple[Run, Run]]) -> dict[str, object]:
    with_stats = [c.require_finished().stats for fast, _ in pairs for c in fast.completions]
    plain_stats = [c.require_finished().stats for _, slow in pairs for c in slow.completions]
    steps = sum(s.num_steps for s in with_stats)
    hits = sum(s.num_hits for s in with_stats)
    misses = steps - hits
    hit_outside = sum(s.hit_outside_ms for s in with_stats)
    outside = sum(s.outside_ms for s in with_stats)
    verified = [sum(depth) for depth in itertools.zip_longest(*(s.verified_by_depth for s in with_stats), fillvalue=0)]
    accepted = [sum(depth) for depth in itertools.zip_longest(*(s.accepted_by_depth for s in with_stats), fillvalue=0)]
    accepted += [0] * (len(verified) - len(accepted))
    verify_steps = sum(s.num_verify_steps for s in with_stats)
    committed = sum(s.mean_acceptance_length * s.num_verify_steps for s in with_stats)
    return {
        "temperature": temperature,
        "batch": batch,
        "num_pairs": len(pairs),
        "speedup": spread([fast.tokens_per_s / slow.tokens_per_s for fast, slow in pairs]),
        "tokens_per_s": spread([fast.tokens_per_s for fast, _ in pairs]),
        "plain_tokens_per_s": spread([slow.tokens_per_s for _, slow in pairs]),
        "tokens_equal": True,
        "mean_acceptance_length": committed / verify_steps if verify_steps else 0.0,
        "acceptance_by_depth": [a / v for a, v in zip(accepted, verified, strict=True) if v],
        "hit_rate": hits / steps if steps else 0.0,
        "share_of_steps_that_verify": verify_steps / steps if steps else 0.0,
        "step_ms": sum(s.verify_ms for s in with_stats) / steps,
        "plain_step_ms": sum(s.verify_ms for s in plain_stats) / sum(s.num_steps for s in plain_stats),
        "hold_off_ms_per_step": sum(s.hold_off_ms for s in with_stats) / steps,
        "draft_ms_per_step": sum(s.draft_ms for s in with_stats) / steps,
        "outside_ms_per_hit": hit_outside / hits if hits else None,
        "outside_ms_per_miss": (outside - hit_outside) / misses if misses else None,
        "plain_outside_ms_per_step": sum(s.outside_ms for s in plain_stats) / sum(s.num_steps for s in plain_stats),
    }


def _print(rows: list[dict[str, object]], console: Console) -> None:
    table = Table(title="decoding: speculation against plain, shipped pair")
    columns = (
        "temperature",
        "batch",
        "speedup",
        "tokens_per_s",
        "plain_tokens_per_s",
        "mean_acceptance_length",
        "hit_rate",
    )
    columns += (
        "step_ms",
        "plain_step_ms",
        "hold_off_ms_per_step",
        "outside_ms_per_hit",
        "outside_ms_per_miss",
    )
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("median")
    return f"{value:.3g}" if isinstance(value, float) else str(value)
