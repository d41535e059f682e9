"""`python -m bench.round`: times of a round's stages, from "verdict decided" to "proposal in the tree".

    python -m bench.round                                    # cpu-80m, coupled and rejection, 1 and 8 sessions
    python -m bench.round --delays 0,0.2,1,5                 # the draft on another host, by network only
    python -m bench.round --machine idle,full

The services are the real ones, each with a probe (`probe/sitecustomize.py`) that stamps messages with the time. All of
them run on this machine, so the stages have one clock. The kernel counts processor time and voluntary context switches
(wake-ups) of all threads of a process; the tables show them per verdict.

With a delay, a proxy delays all that the draft sends and receives, and a direct link is gRPC. Without any, draft and
target are on one host, and a direct link is a Unix socket between their engines.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from bench.delay_proxy import DelayProxy
from bench.deployment import MeasuredDeployment, client_cores, running
from bench.pairs import resolve_pair
from bench.prompts import held_out_prompts
from bench.report import file_name, versions
from bench.round.stamps import DIRECT_STAGES, STAGES, Key, between, read_stamps, rounds
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report, machine
from specdec.commands.measuring.requests import Sampling, run_group
from specdec.commands.measuring.summary import spread
from specdec.commands.measuring.tables import Table
from specdec.commands.up.cluster import Cluster

RESULTS = Path(__file__).parents[1] / "results"
_PROBE = Path(__file__).parent / "probe"
_BURN = "while True: pass"
_RELAYING = "coordinator-relayed"
"""A second coordinator in front of the same replicas, which relays."""
_BY_RELAY = (STAGES[0], "coordinator has proposal")
"""Stages of a round whose proposal a coordinator relays."""


def main(
    pair: Annotated[str, typer.Option(help="Pair, as for `python -m bench`.")] = "cpu-80m",
    modes: Annotated[str, typer.Option(help="Comma-separated: coupled, rejection.")] = "coupled,rejection",
    sessions: Annotated[str, typer.Option(help="Comma-separated numbers of requests at once.")] = "1,8",
    delays: Annotated[
        str, typer.Option(help="Comma-separated one-way delays to and from the draft, in ms; none: it is on this host.")
    ] = "",
    loads: Annotated[
        str, typer.Option("--machine", help="Comma-separated: idle, full (a busy loop per core).")
    ] = "idle",
    paths: Annotated[str, typer.Option(help="Comma-separated: direct, relayed.")] = "direct,relayed",
    temperature: Annotated[float, typer.Option(min=0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=16)] = 96,
    repeats: Annotated[int, typer.Option(help="Groups of requests for each figure.", min=1)] = 4,
    save: Annotated[bool, typer.Option(help="Write <date>-cpu-<pair>-round.* into bench/results.")] = True,
) -> None:
    """Measure and report."""
    console = Console() if sys.stdout.isatty() else Console(width=200)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    made = resolve_pair(pair, "cpu")
    facts = {"machine": machine(cores), "versions": versions()}
    found = Report(pair=made.description, facts=facts, console=console)
    delays_ms: list[float | None] = [float(text) for text in delays.split(",") if text] or [None]
    numbers = [int(text) for text in sessions.split(",")]
    prompts = held_out_prompts(made.target.folder, max(numbers))
    cases: list[Case] = []
    folder = Path(tempfile.mkdtemp(prefix="specdec-round-"))
    try:
        with Progress(console) as progress, ExitStack() as stack:
            stack.enter_context(_probed(folder))
            proxy = stack.enter_context(DelayProxy(client_cores(cores))) if delays_ms[0] is not None else None
            deployment = MeasuredDeployment(pair=made, cores=cores, target={"adaptive_speculation": False})
            # A suspended draft has no rounds.
            cluster = stack.enter_context(running(deployment, progress, proxy, second=_RELAYING))
            for load, delay_ms, mode, number in product(loads.split(","), delays_ms, modes.split(","), numbers):
                beside = [Case(load, delay_ms, mode, number, path) for path in paths.split(",")]
                progress.tell(beside[0].name)
                if proxy is not None and delay_ms is not None:
                    proxy.delay(delay_ms)
                sampling = Sampling(temperature=temperature, max_tokens=max_tokens, verify_mode=mode)
                with _busy(len(cores) if load == "full" else 0):
                    _measure(beside, cluster, prompts[:number], sampling, repeats)
                cases += beside
        reached = read_stamps(folder)
    finally:
        shutil.rmtree(folder)
    figures = [case.figures(reached) for case in cases]
    found.add("round", figures, list(_tables(cases, figures)))
    if save:
        console.print(f"results: {found.save(RESULTS, file_name(f'{made.name}-round', 'cpu'))}")


@dataclass(slots=True)
class Case:
    """Groups of requests under one condition."""

    machine: str
    delay_ms: float | None
    mode: str
    num_sessions: int
    path: str
    spans_ns: list[tuple[int, int]] = field(default_factory=list)
    """Beginning and end of each group."""
    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each group."""
    used: dict[str, dict[str, float]] = field(default_factory=dict)
    """Processor time in ms and wake-ups of all groups, by process."""

    @property
    def name(self) -> str:
        """Column name of the case."""
        return f"{self.condition}, {self.path}"

    @property
    def condition(self) -> str:
        """The name without the path."""
        place = "one host" if self.delay_ms is None else f"{self.delay_ms:g} ms"
        return f"{self.machine}, {place}, {self.mode}, {self.num_sessions}"

    def figures(self, reached: Mapping[str, Mapping[Key, int]]) -> dict[str, Any]:
        """Figures of the case, from the stamps within its time."""
        names = DIRECT_STAGES if self.path == "direct" else STAGES
        times, num_begun = rounds(reached, self.spans_ns, names)
        last = len(names) - 1
        stages = {names[stage]: spread(between(times, stage - 1, stage)) for stage in range(1, last + 1)}
        per_verdict = {
            name: {key: value / max(1, num_begun) for key, value in used.items()} for name, used in self.used.items()
        }
        return {
            "machine": self.machine,
            "delay_ms": self.delay_ms,
            "mode": self.mode,
            "num_sessions": self.num_sessions,
            "path": self.path,
            "tokens_per_s": statistics.median(self.speeds),
            "num_verdicts": num_begun,
            "num_answered": len(times),
            "num_relayed": len(rounds(reached, self.spans_ns, _BY_RELAY)[0]),
            "stages_ms": stages,
            "round_ms": spread(between(times, 0, last)),
            "per_verdict": per_verdict,
        }


def _measure(
    cases: Sequence[Case], cluster: Cluster, prompts: Sequence[tuple[int, ...] | str], sampling: Sampling, repeats: int
) -> None:
    """Measure the cases in turns: the first group of each, then the second of each, and so on."""
    for number in range(repeats + 1):
        for case in cases:
            address = cluster.services["coordinator" if case.path == "direct" else _RELAYING].spec.address
            before, began_ns = _usage(cluster), time.monotonic_ns()
            run = asyncio.run(run_group(address, prompts, sampling, speculate=True))
            after, ended_ns = _usage(cluster), time.monotonic_ns()
            if number == 0:
                continue  # it warmed up caches and cost models
            case.speeds.append(run.tokens_per_s)
            case.spans_ns.append((began_ns, ended_ns))
            for name, used in after.items():
                told = case.used.setdefault(name, dict.fromkeys(used, 0.0))
                for key, value in used.items():
                    told[key] += value - before[name][key]


@contextmanager
def _probed(folder: Path) -> Iterator[None]:
    """Give processes started within the context the probe."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "SPECDEC_ROUND_FOLDER")}
    paths = [str(_PROBE), *filter(None, [before["PYTHONPATH"]])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "SPECDEC_ROUND_FOLDER": str(folder)}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _busy(num_loops: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", _BURN]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _usage(cluster: Cluster) -> dict[str, dict[str, float]]:
    """Processor time and voluntary context switches of each service and engine so far."""
    usage: dict[str, dict[str, float]] = {}
    for name, started in cluster.services.items():
        service = psutil.Process(started.pid)
        for suffix, process in [("", service), *((" engine", child) for child in service.children(recursive=True))]:
            cpu = process.cpu_times()
            told = usage.setdefault(name + suffix, {"cpu_ms": 0.0, "wake_ups": 0.0})
            told["cpu_ms"] += 1e3 * (cpu.user + cpu.system)
            told["wake_ups"] += _wake_ups(process.pid)
    return usage


def _wake_ups(pid: int) -> int:
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def _tables(cases: Sequence[Case], figures: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    yield _whole_rounds(cases, figures)
    names = [case.name for case in cases]
    times = Table("Milliseconds of a round by stage, medians", ["until", *names])
    for stage in STAGES[1:]:
        times.add(stage, *(_median(each["stages_ms"].get(stage, {})) for each in figures))
    times.add("all", *(_median(each["round_ms"]) for each in figures))
    times.add("rounds answered", *(f"{each['num_answered']} of {each['num_verdicts']}" for each in figures))
    times.add("tokens/s", *(f"{each['tokens_per_s']:.0f}" for each in figures))
    yield times
    usage = Table("Processor ms, and wake-ups, per verdict", ["process", *names])
    for name in figures[0]["per_verdict"]:
        used = (each["per_verdict"][name] for each in figures)
        usage.add(name, *(f"{each['cpu_ms']:.2f}, {each['wake_ups']:.1f}" for each in used))
    yield usage


def _whole_rounds(cases: Sequence[Case], figures: Sequence[Mapping[str, Any]]) -> Table:
    """From the verdict to the proposal in the tree: the paths beside each other."""
    columns = ["machine, delay, mode, sessions", "path", "median ms", "quartiles", "direct / relayed", "by the relay"]
    table = Table("Verdict to proposal in the tree", columns)
    medians = {case.name: each["round_ms"].get("median") for case, each in zip(cases, figures, strict=True)}
    for case, each in zip(cases, figures, strict=True):
        ms, relayed = each["round_ms"], medians.get(f"{case.condition}, relayed")
        is_compared = case.path == "direct" and ms and relayed
        table.add(
            case.condition,
            case.path,
            _median(ms),
            f"{ms['q1']:.3f} to {ms['q3']:.3f}" if ms else "",
            f"{ms['median'] / relayed:.2f}" if is_compared else "",
            f"{each['num_relayed']} of {each['num_verdicts']}",
        )
    return table


def _median(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:.3f}" if figure else ""


typer.run(main)
