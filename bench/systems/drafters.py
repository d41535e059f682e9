"""Drafters of a target, each alone, merged, and merged with a draft, on texts of different predictability.

One deployment has the drafters without weights and the draft in the target's process; each request names its drafters.
A second deployment of the shipped target also has the shipped head, which reads states of every step. All sets run
every task, one right after the other, in an order that is rotated by one place and reversed from task to task. The
first task of each kind warms up and does not count. All tokens must be those of plain decoding.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.decode import TokensDiffer
from bench.deployment import MeasuredDeployment, running
from bench.plan import BenchPlan
from bench.systems.workloads import Task, workloads
from specdec.client import Completion
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.requests import Sampling, make_request, new_tenant
from specdec.commands.measuring.summary import spread
from specdec.commands.measuring.tables import Table
from specdec.commands.shipped_pair import shipped_head

EVERY = ("ngram", "suffix", "prediction")
DEAR = ("lookahead", "layer_skip")
"""Drafters that use passes or rows of the target itself; measured alone."""
PLAIN = "plain"
SETS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "draft": ("draft_model",),
    **{name: (name,) for name in (*EVERY, *DEAR)},
    "merged": EVERY,
    "merged and draft": (*EVERY, "draft_model"),
}
HEAD = "eagle3"
HEAD_SETS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "draft": ("draft_model",),
    HEAD: (HEAD,),
    "merged": EVERY,
    "merged and head": (*EVERY, HEAD),
}
"""Sets of the deployment with the shipped head."""
_TOKENS_BESIDE = 1024


@dataclass(slots=True)
class DrafterRow:
    """Counts of one set for the tasks of one kind."""

    speeds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    cost_ms: float = 0.0

    def add(self, completion: Completion) -> None:
        """Add a task's completion."""
        stats = completion.require_finished().stats
        self.speeds.append(completion.tokens_per_second or 0.0)
        self.num_tokens += completion.num_tokens
        self.num_steps += stats.num_steps
        self.num_verified += stats.num_proposed
        self.num_accepted += stats.num_accepted
        self.cost_ms += sum(record.cost_ms for record in stats.drafters)


def run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure all sets on all kinds of text."""
    _measure_sets(plan, report, progress, "drafters", ",".join((*EVERY, *DEAR)), SETS)
    folder = shipped_head(HEAD) if plan.pair.target.name == "shipped-target" else None
    if folder is not None:
        settings = json.dumps([*EVERY, {"method": HEAD, "model": str(folder)}])
        _measure_sets(plan, report, progress, "heads", settings, HEAD_SETS)


def _measure_sets(
    plan: BenchPlan, report: Report, progress: Progress, part: str, drafters: str, sets: Mapping[str, tuple[str, ...]]
) -> None:
    progress.part(part)
    deployment = MeasuredDeployment(
        pair=plan.pair,
        cores=plan.cores,
        device=plan.device,
        placement="together",
        most_tokens=plan.max_tokens + _TOKENS_BESIDE,
        target={"drafters": drafters},
    )
    table = Table(
        f"{plan.label}, {part}",
        ["text", "drafters", "tokens/s", "over plain", "tokens/step", "accepted of verified", "drafter ms/token"],
    )
    found: list[dict[str, object]] = []
    with running(deployment, progress) as cluster:
        for kind, tasks in workloads(plan.pair.target.folder, plan.num_prompts + 1).items():
            rows = asyncio.run(_measure(cluster.address, kind, tasks, sets, plan, progress))
            for name, row in rows.items():
                case = _described(kind, name, row, rows[PLAIN])
                found.append(case)
                columns = ("text", "drafters", "tokens_per_s", "over_plain")
                table.add(
                    *(case[column] for column in columns),
                    f"{row.num_tokens / max(1, row.num_steps):.2f}",
                    f"{row.num_accepted / row.num_verified:.0%}" if row.num_verified else "",
                    f"{row.cost_ms / max(1, row.num_tokens):.3f}",
                )
    report.add(part, {"cases": found, "settings": deployment.settings}, [table], {})


async def _measure(
    address: str,
    kind: str,
    tasks: Sequence[Task],
    sets: Mapping[str, tuple[str, ...]],
    plan: BenchPlan,
    progress: Progress,
) -> dict[str, DrafterRow]:
    rows = {name: DrafterRow() for name in sets if name != "prediction" or any(task.prediction for task in tasks)}
    turns = [(number, task) for _ in range(plan.repeats) for number, task in enumerate(tasks)]
    for turn, (number, task) in enumerate(turns):
        names = list(rows)
        first = turn % len(names)
        order = [*names[first:], *names[:first]]
        answers: dict[str, Completion] = {}
        for name in order if turn % 2 == 0 else reversed(order):
            progress.tell(f"{kind}: turn {turn + 1} of {len(turns)}, {name}")
            answers[name] = await _ask(address, sets[name], task, number, plan.max_tokens)
            if number:
                rows[name].add(answers[name])
        for name, answer in answers.items():
            if answer.choices[0].token_ids != answers[PLAIN].choices[0].token_ids:
                raise TokensDiffer(f"{kind}, text {number}: {name} gave other tokens than plain decoding")
    return rows


async def _ask(address: str, drafters: Sequence[str], task: Task, seed: int, max_tokens: int) -> Completion:
    sampling = Sampling(temperature=task.temperature, max_tokens=max_tokens)
    request = make_request(task.prompt, sampling, seed, speculate=bool(drafters))
    request.speculation.drafters.extend(drafters)
    request.prediction.token_ids.token_ids.extend(task.prediction)
    async with new_tenant(address) as client:
        return await client.complete(request)


def _described(kind: str, name: str, row: DrafterRow, plain: DrafterRow) -> dict[str, object]:
    return {
        "text": kind,
        "drafters": name,
        "tokens_per_s": spread(row.speeds),
        "over_plain": spread([a / b for a, b in zip(row.speeds, plain.speeds, strict=True)]),
        "tokens": row.num_tokens,
        "steps": row.num_steps,
        "verified": row.num_verified,
        "accepted": row.num_accepted,
        "drafter_ms": row.cost_ms,
    }
