"""`python -m tests.adversary chaos`: faults at random, from a printed seed. `... soak`: long load, and what grows."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import structlog
import typer

from tests.adversary import report
from tests.adversary.chaos import BOUND_S, ChaosSettings, run_chaos
from tests.adversary.hosts.hosts import why_none
from tests.adversary.pairs import replicas_with, subject
from tests.adversary.plan import as_json, draw_path, make_plan, make_short_plan, select_kinds
from tests.adversary.soak.report import soak_text
from tests.adversary.soak.run import SoakSettings, run_soak
from tests.adversary.topology import PATHS, Topology
from tests.adversary.workload import make_requests
from tests.support.servers.jumping_clock import NoCompiler, compiler

_Result = TypeVar("_Result")
KEYS_LIVE_MINUTES = 11
"""Keys of the journal and of prefixes live for up to 660 s by default."""
_LEAST_EVENT_S = 3.0
app = typer.Typer(add_completion=False, no_args_is_help=True)


def say(text: str) -> None:
    """Tell people, with the time since the start."""
    typer.echo(f"[{time.monotonic() - _BEGAN_S:7.1f}] {text}")


_BEGAN_S = time.monotonic()


def can_limit() -> bool:
    """Whether services get hosts of their own; says why not."""
    with tempfile.TemporaryDirectory() as folder:
        reason = why_none(Path(folder))
    if reason is not None:
        say(f"no memory limits, slow hosts and full disks: {reason}")
    return reason is None


def can_jump() -> bool:
    """Whether the clock of Redis can jump; says why not."""
    try:
        compiler()
    except NoCompiler as missing:
        say(f"no jumping clocks: {missing}")
        return False
    return True


def run_to_the_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run; SIGINT and SIGTERM end the work in order, so that nothing is left running."""

    async def guarded() -> _Result:
        task = asyncio.ensure_future(work)

        def interrupt(number: signal.Signals) -> None:
            interruptions.append(number)
            say(f"{number.name}: stopping everything")
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
        return await task

    interruptions: list[signal.Signals] = []
    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not interruptions:
            raise
        raise SystemExit(128 + interruptions[0]) from None


@app.callback()
def prepare() -> None:
    """Try to break a fleet, and tell whether it broke."""
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        del os.environ[name]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))


@app.command()
def chaos(
    seed: Annotated[int | None, typer.Option(help="Of the plan and of the clients; none: a random one.")] = None,
    only: Annotated[str, typer.Option(help="Numbers of events of the plan, separated by commas; none: all.")] = "",
    kinds: Annotated[str, typer.Option(help="KIND or KIND:TIER, separated by commas; * stands for anything.")] = "",
    rounds: Annotated[int, typer.Option(help="How often each kind comes.", min=1)] = 1,
    num_pairs: Annotated[
        int | None, typer.Option(help="Pairs of faults per round; none: half as many as kinds.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Least number of answers that are compared.", min=1)] = 1000,
    distinct: Annotated[int, typer.Option(help="Different requests among them.", min=1)] = 96,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 12,
    gateways: Annotated[int, typer.Option(help="Gateways.", min=0)] = 2,
    http_clients: Annotated[int, typer.Option(help="Clients of gateways at once.", min=0)] = 4,
    bound_s: Annotated[float, typer.Option(help="Within which every stream is to go on.")] = BOUND_S,
    pair: Annotated[str, typer.Option(help="shipped or tiny")] = "shipped",
    path: Annotated[str, typer.Option(help=f"Way of proposals: {', '.join(PATHS)}; none: drawn from the seed.")] = "",
    minutes: Annotated[
        float | None, typer.Option(help="Begin no event later, and go round until then; none: each round once.")
    ] = None,
    coordinator_processes: Annotated[int, typer.Option(help="Processes of the first coordinator.", min=1)] = 2,
    limits: Annotated[
        bool, typer.Option(help="Give each service Compose's memory limit and a disk; needs root.")
    ] = True,
    sentinel: Annotated[bool, typer.Option(help="Redis is a primary that a sentinel watches.")] = False,
    short: Annotated[bool, typer.Option(help="The plan of the short run in `make test-all`.")] = False,
    logs: Annotated[Path | None, typer.Option(help="Folder of the services' logs; none: a new one.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of results.")] = report.RESULTS,
    keep: Annotated[bool, typer.Option(help="Write results.")] = True,
    dry: Annotated[bool, typer.Option(help="Print the plan and end.")] = False,
) -> None:
    """Break things at random while clients compare all answers with undisturbed runs."""
    seed = secrets.randbelow(2**32) if seed is None else seed
    topology = Topology(
        num_clients=clients,
        num_gateways=gateways,
        num_http_clients=http_clients if gateways else 0,
        path=path or draw_path(seed),
        num_processes=coordinator_processes,
        has_hosts=limits and can_limit(),
        has_sentinel=sentinel,
        has_clock=not sentinel and can_jump(),
    )
    chosen = select_kinds([pattern for pattern in kinds.split(",") if pattern], topology)
    if minutes is not None:
        rounds = max(rounds, math.ceil(minutes * 60 / len(chosen) / _LEAST_EVENT_S))
    plan = make_plan(seed, topology, kinds=chosen, rounds=rounds, num_pairs=num_pairs)
    if short:
        plan = make_short_plan(seed, topology)
    wanted = {int(number) for number in only.split(",") if number}
    plan = [event for event in plan if not wanted or event.index in wanted]
    say(f"seed {seed}, path {topology.path}; again with --seed {seed}, one event of it with --only N")
    for event in plan:
        typer.echo(f"  {event.describe()}")
    if dry:
        return
    folder = logs or Path(tempfile.mkdtemp(prefix="specdec-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"logs in {folder}")
    models = subject(pair, folder)
    settings = ChaosSettings(
        events=plan,
        requests=make_requests(distinct, models.sizes),
        num_requests=requests,
        seed=seed,
        bound_s=bound_s,
        seconds=math.inf if minutes is None else minutes * 60,
    )
    result = run_to_the_end(run_chaos(models.fleet(topology), settings, folder, say))
    command = (
        f"make chaos CHAOS_ARGS='{' '.join([*sys.argv[2:], *([] if '--seed' in sys.argv else ['--seed', str(seed)])])}'"
    )
    text = report.chaos_text(result, command)
    typer.echo(text)
    if keep:
        raw = {"seed": seed, "command": command, "pair": pair, "plan": as_json(plan), **report.chaos_json(result)}
        say(f"results: {report.save(f'chaos-{pair}', raw, text, results)}")
    if result.verdict.failures:
        say(f"FAILED: {len(result.verdict.failures)} failures with seed {seed}; logs in {folder}")
        raise SystemExit(1)


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="How long the load lasts.", min=1.0)] = 60.0,
    share: Annotated[float, typer.Option(help="The load, as a share of what was measured as capacity.")] = 0.8,
    capacity_s: Annotated[float, typer.Option(help="How long capacity is measured.", min=5.0)] = 60.0,
    clients: Annotated[int, typer.Option(help="Clients at once when capacity is measured.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of the requests and their moments.")] = 1,
    pair: Annotated[str, typer.Option(help="shipped or tiny")] = "shipped",
    limits: Annotated[
        bool, typer.Option(help="Give each service Compose's memory limit and a disk; needs root.")
    ] = True,
    kv_blocks: Annotated[int, typer.Option(help="KV blocks of each replica, few so that the cache fills early.")] = 512,
    logs: Annotated[Path | None, typer.Option(help="Folder of the services' logs; none: a new one.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of results.")] = report.RESULTS,
    keep: Annotated[bool, typer.Option(help="Write results.")] = True,
) -> None:
    """Load with churn for long; fails when memory, descriptors, blocks, sessions, keys or latencies grow."""
    folder = logs or Path(tempfile.mkdtemp(prefix="specdec-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"logs in {folder}")
    models = subject(pair, folder)
    settings = SoakSettings(minutes=minutes, share=share, capacity_s=capacity_s, sizes=models.sizes, seed=seed)
    fleet = replicas_with(
        models.fleet(Topology(num_clients=clients, has_hosts=limits and can_limit())), num_blocks=kv_blocks
    )
    if minutes < KEYS_LIVE_MINUTES * 3:
        # Else keys could but grow for as long as the run lasts.
        brief_s = max(1.0, minutes * 60 / 6)
        fleet = replace(fleet, coordinator={"journal_keep_s": brief_s, "prefix_ttl_s": brief_s})
    result = run_to_the_end(run_soak(fleet, settings, folder, say))
    command = f"make soak SOAK_ARGS='{' '.join(sys.argv[2:])}'"
    text = soak_text(result, command)
    typer.echo(text)
    if keep:
        raw = {"command": command, "pair": pair, **asdict(result)}
        say(f"results: {report.save(f'soak-{pair}', raw, text, results)}")
    if result.failures:
        say(f"FAILED: {len(result.failures)} failures; logs in {folder}")
        raise SystemExit(1)


if __name__ == "__main__":
    app()
