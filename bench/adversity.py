"""The worst drafts, prompts and loads: whether decoding with speculation stays as fast as plain decoding.

Each *adversity* is a scenario of some seconds, run with speculation and without, in turns. Its figure is the time of
plain decoding over the time with speculation. A figure below 0.97 breaks the promise of "never slower".
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Event, Thread

from bench.decode import TokensDiffer, warm_up
from bench.delay_proxy import DelayProxy
from bench.deployment import MeasuredDeployment, client_cores, running
from bench.noisy import noisy
from bench.pairs import PairMember
from bench.plan import BenchPlan
from bench.prompts import Prompt, held_out_prompts
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.requests import Run, run_group
from specdec.commands.measuring.summary import spread
from specdec.commands.measuring.tables import Table

PROMISE = 0.97
_FAR_MS, _SWITCH_S = 200.0, 1.5
_LOADS = (1, 8, 1, 8)
_MOST_AT_ONCE = 8
_RANDOM_TOKENS = (64, 3000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adversity:
    """One scenario: groups of prompts, one after the other."""

    name: str
    groups: Sequence[Sequence[Prompt]]
    is_random: bool = False
    """Whether the draft's weights are random."""
    delays_ms: tuple[float, ...] = ()
    """One-way delays of the draft's link; several take turns."""


def _adversities(plan: BenchPlan) -> list[Adversity]:
    folder = plan.pair.target.folder
    prompts = held_out_prompts(folder, max(plan.num_prompts, _MOST_AT_ONCE))
    alone, crowd = [prompts[n : n + 1] for n in range(4)], [prompts[:_MOST_AT_ONCE]] * 3
    rng = random.Random(0)
    noise = [tuple(rng.randrange(_RANDOM_TOKENS[1]) for _ in range(_RANDOM_TOKENS[0])) for _ in prompts]
    switching = [[prompts[n] if n % 2 else noise[n]] for n in range(6)]
    mixed = [[prompts[n] if n % 2 else noise[n] for n in range(_MOST_AT_ONCE)]] * 3
    changing = [prompts[:count] for count in _LOADS]
    return [
        Adversity(name="a random draft, 1 at once", groups=alone, is_random=True),
        Adversity(name="a random draft, 8 at once", groups=crowd, is_random=True),
        Adversity(name="a draft 200 ms away, 1 at once", groups=alone, delays_ms=(_FAR_MS,)),
        Adversity(name="a draft 200 ms away, 8 at once", groups=crowd, delays_ms=(_FAR_MS,)),
        Adversity(name="a draft that is far every other 1.5 s", groups=alone * 2, delays_ms=(0.0, _FAR_MS)),
        Adversity(name="prompts that switch, 1 at once", groups=switching),
        Adversity(name="prompts of two kinds, 8 at once", groups=mixed),
        Adversity(name="8 at once", groups=crowd),
        Adversity(name="a load that comes and goes, 1 and 8", groups=changing),
    ]


def run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure every adversity at every temperature."""
    progress.part("adversity")
    rows: list[dict[str, object]] = []
    adversities = _adversities(plan)
    for is_random, has_link in sorted({(a.is_random, bool(a.delays_ms)) for a in adversities}):
        those = [a for a in adversities if (a.is_random, bool(a.delays_ms)) == (is_random, has_link)]
        with _started(plan, progress, is_random=is_random, has_link=has_link) as (address, proxy):
            asyncio.run(warm_up(address, plan))
            for adversity in those:
                for temperature in plan.temperatures:
                    rows.append(_measure(address, adversity, temperature, plan, proxy, progress))
    table = Table(f"Adversity, {plan.label}", ["what", "temperature", "plain time / time", "worst", "suspended"])
    for row in rows:
        columns = ("what", "temperature", "speedup", "worst", "share_of_steps_suspended")
        table.add(*(row[column] for column in columns))
    table.notes.append(f"Medians and quartiles of runs in turns; the promise is {PROMISE} or more.")
    report.add("adversity", rows, [table])


@contextmanager
def _started(
    plan: BenchPlan, progress: Progress, *, is_random: bool, has_link: bool
) -> Iterator[tuple[str, DelayProxy | None]]:
    pair = plan.pair
    if is_random:
        pair = dataclasses.replace(pair, draft=PairMember(name="random", folder=noisy(pair.draft.folder, 1.0)))
    deployment = MeasuredDeployment(
        pair=pair,
        cores=plan.cores,
        device=plan.device,
        most_tokens=_MOST_AT_ONCE * (plan.max_tokens + 256),
        placement="apart" if has_link else plan.placement,
    )
    with ExitStack() as stack:
        proxy = stack.enter_context(DelayProxy(client_cores(plan.cores))) if has_link else None
        yield stack.enter_context(running(deployment, progress, proxy)).address, proxy


def _measure(
    address: str,
    adversity: Adversity,
    temperature: float,
    plan: BenchPlan,
    proxy: DelayProxy | None,
    progress: Progress,
) -> dict[str, object]:
    sampling = dataclasses.replace(plan.sampling, temperature=temperature)
    ratios, suspended = [], []
    for repeat in range(plan.repeats):
        progress.tell(f"{adversity.name}, temperature {temperature:g}: repeat {repeat + 1} of {plan.repeats}")
        took: dict[bool, float] = {}
        runs: dict[bool, list[Run]] = {}
        for speculate in (True, False) if repeat % 2 == 0 else (False, True):
            with _switched(proxy, adversity.delays_ms):
                began_s = time.perf_counter()
                runs[speculate] = [
                    asyncio.run(run_group(address, group, sampling, speculate=speculate)) for group in adversity.groups
                ]
                took[speculate] = time.perf_counter() - began_s
        if plan.device == "cpu" and sampling.is_reproducible and _tokens(runs[True]) != _tokens(runs[False]):
            raise TokensDiffer(f"{adversity.name}, temperature {temperature}")
        stats = [c.require_finished().stats for each in runs[True] for c in each.completions]
        suspended.append(sum(s.num_suspended_steps for s in stats) / sum(s.num_steps for s in stats))
        ratios.append(took[False] / took[True])
    return {
        "what": adversity.name,
        "temperature": temperature,
        "speedup": spread(ratios),
        "worst": min(ratios),
        "share_of_steps_suspended": sum(suspended) / len(suspended),
    }


def _tokens(runs: Sequence[Run]) -> list[list[list[int]]]:
    return [each.token_ids for each in runs]


@contextmanager
def _switched(proxy: DelayProxy | None, delays_ms: Sequence[float]) -> Iterator[None]:
    """Give the link these delays in turns, beginning with the first."""
    if proxy is None or not delays_ms:
        yield
        return
    link, is_over = proxy, Event()

    def switch() -> None:
        turn = 0
        while True:
            link.delay(delays_ms[turn % len(delays_ms)])
            turn += 1
            if is_over.wait(_SWITCH_S):
                return

    thread = Thread(target=switch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        link.delay(0.0)
