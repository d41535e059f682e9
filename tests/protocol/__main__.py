"""`python -m tests.protocol`: the protocol explored, at random from a printed seed, or exhaustively."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import typer

from tests.protocol.exhaustive.bounds import BOUNDS
from tests.protocol.exhaustive.explorer import explore, replay
from tests.protocol.exhaustive.pair_system import PairSystem
from tests.protocol.runs.link_run import run_link
from tests.protocol.runs.report import explain
from tests.protocol.runs.run import run
from tests.protocol.runs.schedule import Schedule, draw

_MOST_STATES = 1_000_000


def main(
    seed: Annotated[int | None, typer.Option(help="Of the first run; none: a random one.", min=0)] = None,
    runs: Annotated[int, typer.Option(help="How many, each with the seed after the one before.", min=0)] = 100,
    actions: Annotated[int, typer.Option(help="Most of a run.", min=3)] = 24,
    links: Annotated[bool, typer.Option("--links", help="One direct link each, with all its faults.")] = False,
    exhaustive: Annotated[str, typer.Option(help=f"Explore all orders instead: {', '.join(BOUNDS)}.")] = "",
    events: Annotated[str, typer.Option(help="With --exhaustive: the events to do again, as they were printed.")] = "",
    replay_schedule: Annotated[str, typer.Option("--replay", help="The schedule to run again, as printed.")] = "",
    shrink_tries: Annotated[int, typer.Option(help="Most runs to make a schedule shorter.", min=0)] = 200,
) -> None:
    """Look for an order of events in which the protocol fails."""
    if exhaustive:
        found = _explore(exhaustive, events)
    elif links:
        first = secrets.randbits(31) if seed is None else seed
        typer.echo(f"seed {first}")
        found = _run_links(range(first, first + runs))
    elif replay_schedule:
        found = _run_all([Schedule.parse(replay_schedule)], 0)
    else:
        first = secrets.randbits(31) if seed is None else seed
        typer.echo(f"seed {first}")
        found = _run_all([draw(first + number, most_actions=actions) for number in range(runs)], shrink_tries)
    raise typer.Exit(code=int(found))


def _run_all(schedules: list[Schedule], shrink_tries: int) -> bool:
    started_s, num_requests, num_tokens, num_linked, num_bad = time.process_time(), 0, 0, 0, 0
    for schedule in schedules:
        outcome = run(schedule)
        num_requests += outcome.num_requests
        num_tokens += outcome.num_tokens
        num_linked += outcome.num_linked
        if outcome.violations:
            num_bad += 1
            typer.echo(explain(schedule, outcome, most_tries=shrink_tries))
    took_s = time.process_time() - started_s
    typer.echo(
        f"{len(schedules)} runs, {num_requests} requests, {num_tokens} tokens, {num_linked} verdicts on direct links, "
        f"{took_s:.0f} CPU-s: {num_bad} with violations"
    )
    return num_bad > 0


def _run_links(seeds: range) -> bool:
    outcomes = {seed: run_link(seed) for seed in seeds}
    for seed, outcome in outcomes.items():
        for violation in outcome.violations:
            typer.echo(f"--links --seed {seed} --runs 1: {violation}")
    num_linked = sum(outcome.num_linked for outcome in outcomes.values())
    num_relayed = sum(outcome.num_relayed for outcome in outcomes.values())
    num_bad = sum(bool(outcome.violations) for outcome in outcomes.values())
    typer.echo(
        f"{len(seeds)} runs, {num_linked} verdicts direct, {num_relayed} proposals relayed: {num_bad} with violations"
    )
    return num_bad > 0


def _explore(name: str, events: str) -> bool:
    if name not in BOUNDS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(BOUNDS)}")
    bounds = BOUNDS[name].bounds
    if events:
        faults = replay(lambda: PairSystem(bounds), events.split(";"))
        typer.echo("\n".join(faults) or "nothing")
        return bool(faults)
    report = explore(lambda: PairSystem(bounds), most_states=_MOST_STATES, must_end=bounds.must_end)
    typer.echo(f"{name}: {report}")
    return bool(report.finding) or not report.is_complete


if __name__ == "__main__":
    typer.run(main)
