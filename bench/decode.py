"""Decoding speed through the whole system, with and without speculation, and where the time of a step goes.

Runs alternate: each prompt (or group of prompts) is decoded with speculation and without, in an order that flips from
repeat to repeat. The figure is the median of the pairwise ratios. Where speculation may change no token, the run fails
unless the tokens of every pair are equal. On GPUs, whose fast matrix products depend on the number of rows, the share
of requests with equal tokens is reported instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.deployment import MeasuredDeployment, running
from bench.plan import BenchPlan
from bench.prompts import Prompt, held_out_prompts
from specdec.commands.measuring.closed_loop import run_loop
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.requests import Run, Sampling, run_group
from specdec.commands.measuring.summary import spread
from specdec.commands.measuring.tables import Table
from specdec.v1 import coordinator_pb2 as api

_COLUMNS = {
    "speedup": "speculation / plain",
    "tokens_per_s": "tokens/s",
    "plain_tokens_per_s": "plain",
    "mean_acceptance_length": "mean acceptance length",
    "hit_rate": "hits",
    "step_ms": "step ms",
    "plain_step_ms": "plain step ms",
    "tokens_equal": "equal",
    "share_of_steps_suspended": "suspended",
    "hold_off_ms_per_step": "hold-off ms",
    "first_verified_token": "first verified token",
    "outside_ms_of_hits": "outside ms, hit",
    "outside_ms_of_misses": "outside ms, miss",
    "plain_outside_ms_per_step": "outside ms, plain",
}


_UNTIMED_GROUPS = 4
"""Groups of prompts, at most, that run once more with their steps reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests, concurrency and repeats of one row."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    batch: int = 1
    repeats: int = 1
    rounds: int = 1
    """Requests per place of a batch above 1; more than one is a closed loop."""
    is_exact: bool = True
    """Whether logits do not depend on the batch; otherwise near-ties may flip, and equal tokens are only counted."""

    @property
    def is_loop(self) -> bool:
        """Whether a request that ends is followed by another one."""
        return self.batch > 1 and self.rounds > 1

    @property
    def groups(self) -> list[Sequence[Prompt]]:
        """Prompts of each batch, or of each loop."""
        size = self.batch * self.rounds if self.is_loop else self.batch
        prompts = list(itertools.islice(itertools.cycle(self.prompts), max(size, len(self.prompts))))
        return [prompts[i : i + size] for i in range(0, len(prompts) - size + 1, size)]

    async def run(self, address: str, group: Sequence[Prompt], *, speculate: bool) -> Run:
        """Run one of the groups."""
        if self.is_loop:
            return await run_loop(address, group, self.sampling, at_once=self.batch, speculate=speculate)
        return await run_group(address, group, self.sampling, speculate=speculate)


class TokensDiffer(AssertionError):
    """The same requests gave different tokens with and without speculation."""


def run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure every temperature and batch size."""
    progress.part("decode")
    most_tokens = max(plan.batches) * (plan.max_tokens + 256)
    deployment = MeasuredDeployment(
        pair=plan.pair, cores=plan.cores, device=plan.device, most_tokens=most_tokens, placement=plan.placement
    )
    with running(deployment, progress) as cluster:
        rows = asyncio.run(_measure(cluster.address, plan, progress))
    table = Table(f"Decoding, {plan.label}", ["temperature", "batch", *_COLUMNS.values()])
    for row in rows:
        table.add(row["temperature"], row["batch"], *(row[column] for column in _COLUMNS))
    table.notes.append("Medians and quartiles of pairwise ratios; milliseconds are per target step.")
    report.add("decode", rows, [table])


async def _measure(address: str, plan: BenchPlan, progress: Progress) -> list[dict[str, object]]:
    rows = []
    await warm_up(address, plan)
    for temperature, batch in itertools.product(plan.temperatures, plan.batches):
        case = Case(
            prompts=held_out_prompts(plan.pair.target.folder, max(plan.num_prompts, batch)),
            sampling=dataclasses.replace(plan.sampling, temperature=temperature),
            batch=batch,
            repeats=plan.repeats,
            rounds=plan.rounds,
            is_exact=plan.device == "cpu",
        )
        rows.append(await measure(address, case, progress))
    return rows


async def warm_up(address: str, plan: BenchPlan) -> None:
    """Run requests that fill caches and teach the cost models."""
    prompts = held_out_prompts(plan.pair.target.folder, 2)
    for speculate in (True, False):
        await run_group(address, prompts, Sampling(max_tokens=min(32, plan.max_tokens)), speculate=speculate)


async def measure(address: str, case: Case, progress: Progress) -> dict[str, object]:
    """Run a case with and without speculation, alternating; returns its row. Raises TokensDiffer."""
    pairs: list[tuple[Run, Run]] = []
    for repeat, (index, group) in itertools.product(range(case.repeats), enumerate(case.groups)):
        sampling = case.sampling
        progress.tell(
            f"temperature {sampling.temperature:g}, {case.batch} at once: "
            f"repeat {repeat + 1} of {case.repeats}, group {index + 1} of {len(case.groups)}"
        )
        order = (True, False) if (repeat + index) % 2 == 0 else (False, True)
        runs = {s: await case.run(address, group, speculate=s) for s in order}
        if case.is_exact and sampling.is_reproducible and runs[True].token_ids != runs[False].token_ids:
            raise TokensDiffer(f"temperature {sampling.temperature}, group {index}")
        pairs.append((runs[True], runs[False]))
    told = dataclasses.replace(case.sampling, with_steps=True)
    untimed = [await run_group(address, group, told, speculate=True) for group in case.groups[:_UNTIMED_GROUPS]]
    return _summary(case, pairs) | _by_step([c.choices[0].steps for run in untimed for c in run.completions])


def _by_step(choices: Sequence[Sequence[api.DecodingStep]]) -> dict[str, object]:
    """Figures of single steps. Their runs are not timed, because reporting each step takes time.

    The time outside is that of a step outside the forward pass and the hold-off, of hits and of misses: the
    coordinator, gRPC, detokenizing and the draft's use of the cores take it. The first verified token is the number of
    the first token, from 1, that a step with a proposal committed.
    """
    found: dict[bool, list[float]] = {True: [], False: []}
    for steps in choices:
        for before, step in itertools.pairwise(steps):
            outside_us = step.at_us - before.at_us - step.step_us - step.hold_off_us
            found[step.num_tokens > 1].append(outside_us / 1e3)
    first = [next((step.start + 1 for step in steps if step.HasField("tree")), None) for steps in choices]
    return {
        "outside_ms_of_hits": spread(found[True]),
        "outside_ms_of_misses": spread(found[False]),
        "first_verified_token": spread([float(number) for number in first if number is not None]),
        "share_never_verified": first.count(None) / len(first),
    }


def _share_equal(pairs: Sequence[tuple[Run, Run]]) -> float:
    """Share of the requests whose tokens are the same with and without speculation."""
    of_both = [both for fast, slow in pairs for both in zip(fast.token_ids, slow.token_ids, strict=True)]
    return sum(fast == slow for fast, slow in of_both) / len(of_both)


def _summary(case: Case, pairs: list[tuple[Run, Run]]) -> dict[str, object]:
    with_stats = [c.require_finished().stats for fast, _ in pairs for c in fast.completions]
    plain_stats = [c.require_finished().stats for _, slow in pairs for c in slow.completions]
    steps = sum(s.num_steps for s in with_stats)
    plain_steps = sum(s.num_steps for s in plain_stats)
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
        "temperature": case.sampling.temperature,
        "batch": case.batch,
        "num_pairs": len(pairs),
        "speedup": spread([fast.tokens_per_s / slow.tokens_per_s for fast, slow in pairs]),
        "tokens_per_s": spread([fast.tokens_per_s for fast, _ in pairs]),
        "plain_tokens_per_s": spread([slow.tokens_per_s for _, slow in pairs]),
        "tokens_equal": _share_equal(pairs) if case.sampling.is_reproducible else None,
        "mean_acceptance_length": committed / verify_steps if verify_steps else 0.0,
        "acceptance_by_depth": [a / v for a, v in zip(accepted, verified, strict=True) if v],
        "hit_rate": hits / steps if steps else 0.0,
        "share_of_steps_that_verify": verify_steps / steps if steps else 0.0,
        "share_of_steps_suspended": sum(s.num_suspended_steps for s in with_stats) / steps,
        "step_ms": sum(s.verify_ms for s in with_stats) / steps,
        "plain_step_ms": sum(s.verify_ms for s in plain_stats) / plain_steps,
        "hold_off_ms_per_step": sum(s.hold_off_ms for s in with_stats) / steps,
        "draft_ms_per_step": sum(s.draft_ms for s in with_stats) / steps,
        "outside_ms_per_hit": hit_outside / hits if hits else None,
        "outside_ms_per_miss": (outside - hit_outside) / misses if misses else None,
        "plain_outside_ms_per_step": sum(s.outside_ms for s in plain_stats) / plain_steps,
    }
