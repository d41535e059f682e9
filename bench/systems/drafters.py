"""Drafters of a target, each alone, merged, and merged with a draft, on texts of different predictability.

One deployment has the drafters without weights and the draft in the target's process; each request names its drafters.
A second deployment also has the target's head, if there is one, which reads states of every step. All sets run every
task (or every group of tasks at once), one right after the other, in an order that is rotated by one place and reversed
from turn to turn. The first group of each kind warms up and does not count. All tokens must be those of plain decoding.
"""

from __future__ import annotations

import asyncio
import itertools
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
from specdec.commands.measuring.requests import Sampling, make_request, run_requests
from specdec.commands.measuring.summary import spread
from specdec.commands.measuring.tables import Table

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
"""Sets of the deployment with a head."""
NAMES = tuple(name for name in dict.fromkeys((*SETS, *HEAD_SETS)) if name != PLAIN)
_TOKENS_BESIDE = 1024


@dataclass(frozen=True, slots=True)
class DrafterCase:
    """Tasks of one kind, and how they are asked."""

    kind: str
    temperature: float
    at_once: int
    tasks: Sequence[Task]

    @property
    def words(self) -> str:
        """Text for progress and errors."""
        return f"{self.kind}, temperature {self.temperature:g}, {self.at_once} at once"


@dataclass(slots=True)
class DrafterRow:
    """Counts of one set for the tasks of one kind."""

    speeds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    cost_ms: float = 0.0

    def add(self, completions: Sequence[Completion], speed: float) -> None:
        """Add the completions of a group, which had `speed` tokens per second together."""
        self.speeds.append(speed)
        for completion in completions:
            stats = completion.require_finished().stats
            self.num_tokens += completion.num_tokens
            self.num_steps += stats.num_steps
            self.num_verified += stats.num_proposed
            self.num_accepted += stats.num_accepted
            self.cost_ms += sum(record.cost_ms for record in stats.drafters)


def run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure all sets on all kinds of text, at each temperature and number of requests at once."""
    _measure_sets(plan, report, progress, "drafters", SETS)
    if plan.pair.head is not None:
        _measure_sets(plan, report, progress, "heads", HEAD_SETS)


def _measure_sets(
    plan: BenchPlan, report: Report, progress: Progress, part: str, known: Mapping[str, tuple[str, ...]]
) -> None:
    sets = {name: used for name, used in known.items() if name == PLAIN or not plan.sets or name in plan.sets}
    names = dict.fromkeys(name for used in sets.values() for name in used if name != "draft_model")
    if len(sets) == 1 or (known is HEAD_SETS and HEAD not in names):
        return
    drafters = json.dumps(
        [{"method": name, "model": str(plan.pair.head)} if name == HEAD else {"method": name} for name in names]
    )
    progress.part(part)
    deployment = MeasuredDeployment(
        pair=plan.pair,
        cores=plan.cores,
        device=plan.device,
        placement="together",
        most_tokens=max(plan.batches) * (plan.max_tokens + _TOKENS_BESIDE),
        target={"drafters": drafters},
    )
    columns = ("text", "temperature", "at_once", "drafters", "tokens_per_s", "over_plain", "over_ngram")
    table = Table(
        f"{plan.label}, {part}",
        [*(name.replace("_per_s", "/s").replace("_", " ") for name in columns), "tokens/step",
         "accepted of verified", "drafter ms/token"],
    )  # fmt: skip
    found: list[dict[str, object]] = []
    with running(deployment, progress) as cluster:
        num_tasks = max(max(plan.num_prompts, batch) + batch for batch in plan.batches)
        texts = workloads(plan.pair.target.folder, num_tasks)
        for batch, temperature, (kind, tasks) in itertools.product(plan.batches, plan.temperatures, texts.items()):
            case = DrafterCase(kind, temperature, batch, tasks[: max(plan.num_prompts, batch) + batch])
            rows = asyncio.run(_measure(cluster.address, case, sets, plan, progress))
            for name, row in rows.items():
                described = _described(case, name, row, rows)
                found.append(described)
                table.add(
                    *(described.get(column, "-") for column in columns),
                    f"{row.num_tokens / max(1, row.num_steps):.2f}",
                    f"{row.num_accepted / row.num_verified:.0%}" if row.num_verified else "",
                    f"{row.cost_ms / max(1, row.num_tokens):.3f}",
                )
    report.add(part, {"cases": found, "settings": deployment.settings}, [table], {})


async def _measure(
    address: str, case: DrafterCase, sets: Mapping[str, tuple[str, ...]], plan: BenchPlan, progress: Progress
) -> dict[str, DrafterRow]:
    tasks = case.tasks
    rows = {name: DrafterRow() for name in sets if name != "prediction" or any(task.prediction for task in tasks)}
    groups = [(first, tasks[first : first + case.at_once]) for first in range(0, len(tasks), case.at_once)]
    groups = [(first, group) for first, group in groups if len(group) == case.at_once]
    turns = [group for _ in range(plan.repeats) for group in groups]
    for turn, (number, group) in enumerate(turns):
        names = list(rows)
        first = turn % len(names)
        order = [*names[first:], *names[:first]]
        answers: dict[str, list[Completion]] = {}
        for name in order if turn % 2 == 0 else reversed(order):
            progress.tell(f"{case.words}: turn {turn + 1} of {len(turns)}, {name}")
            answers[name], speed = await _ask(address, sets[name], group, number, case.temperature, plan.max_tokens)
            if number:
                rows[name].add(answers[name], speed)
        expected = [answer.choices[0].token_ids for answer in answers[PLAIN]]
        for name, found in answers.items():
            if [answer.choices[0].token_ids for answer in found] != expected:
                raise TokensDiffer(f"{case.words}, text {number}: {name} gave other tokens than plain decoding")
    return rows


async def _ask(
    address: str, drafters: Sequence[str], group: Sequence[Task], seed: int, temperature: float, max_tokens: int
) -> tuple[list[Completion], float]:
    """Completions of a group, and its speed as `run_group` counts it."""
    requests = []
    for number, task in enumerate(group):
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens, stop_at_eos=task.stops)
        request = make_request(task.prompt, sampling, seed + number, speculate=bool(drafters))
        request.speculation.drafters.extend(drafters)
        request.prediction.token_ids.token_ids.extend(task.prediction)
        requests.append(request)
    found = await run_requests(address, requests)
    return list(found.completions), found.tokens_per_s


def _described(case: DrafterCase, name: str, row: DrafterRow, rows: Mapping[str, DrafterRow]) -> dict[str, object]:
    over = {
        f"over_{other}": spread([a / b for a, b in zip(row.speeds, rows[other].speeds, strict=True) if b])
        for other in (PLAIN, "ngram")
        if other in rows
    }
    return {
        "text": case.kind,
        "temperature": case.temperature,
        "at_once": case.at_once,
        "drafters": name,
        "tokens_per_s": spread(row.speeds),
        **over,
        "tokens": row.num_tokens,
        "steps": row.num_steps,
        "verified": row.num_verified,
        "accepted": row.num_accepted,
        "drafter_ms": row.cost_ms,
    }
