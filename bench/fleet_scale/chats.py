"""Chats over fleets with subsets: their requests go to any coordinator in turn, or all of a chat to one.

    python -m bench.fleet_scale.chats --targets 256,1000

What is cached, and the wait for the first token, of fleets as in `bench.fleet_scale`: predictions.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.fleet_scale.fleets import TARGETS_PER_COORDINATOR, Parts, parts
from specdec.plan.inputs.traffic import Arrival
from specdec.plan.simulation.coordinator import CoordinatorSettings
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetSimulation

SUBSET, NUM_APPLICATIONS = 64, 20
BLOCK, SYSTEM, TURN = 256, 512, 512
"""Tokens of a block, of an application's system prompt, and of a question with the answer before it."""
NUM_TURNS, OUTPUT = 8, 200
START_S, GAP_S, TAIL_S = 20.0, (5.0, 9.0), 60.0
"""Seconds in which chats begin, and from a question to the next one."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet to simulate."""

    num_targets: int
    chats_per_target: float
    by_chat: bool
    popular: float = 0.0
    """Share of the chats that begin with one and the same question."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a fleet did."""

    case: Case
    cached: float
    """Share of the prompts' tokens that their targets had."""
    most_cached: float
    """The same if each target had all that any of them has computed."""
    first_token_s: tuple[float, float]
    """Median and 99th percentile."""
    busy: float
    num_ended: int
    num_arrived: int
    took_s: float


def chats(num: int, popular: float, seed: int = 3) -> list[Arrival]:
    """The requests of all chats. The first question's blocks count as the chat's beginning."""
    rng = np.random.default_rng(seed)
    system, turn = SYSTEM // BLOCK, TURN // BLOCK
    requests: list[Arrival] = []
    for chat in range(num):
        own = int(rng.integers(NUM_APPLICATIONS)) * 1000
        ids = [own + block for block in range(system)]
        is_popular, at_s = rng.random() < popular, rng.uniform(0, START_S)
        for number in range(NUM_TURNS):
            ids += [(0 if is_popular and not number else 1 + chat) * 10**6 + len(ids) + n for n in range(turn)]
            requests.append(Arrival(at_s, BLOCK * len(ids), OUTPUT, prefix=tuple(ids), num_begin=system + turn))
            at_s += rng.uniform(*GAP_S)
    return sorted(requests, key=lambda request: request.at_s)


def simulate(case: Case, made_of: Parts) -> Found:
    """Run the chats of a fleet to their ends."""
    began_s = time.process_time()
    num_coordinators = max(3, case.num_targets // TARGETS_PER_COORDINATOR)
    plan = FleetPlan(
        num_targets=case.num_targets,
        num_coordinators=num_coordinators,
        target=made_of.target,
        coordinator=CoordinatorSettings(max_running=100_000, max_waiting=100_000),
        subset_size=SUBSET,
        by_chat=case.by_chat,
    )
    arrivals = chats(round(case.chats_per_target * case.num_targets), case.popular)
    run = FleetSimulation(plan, Clients(), 1).run(arrivals, arrivals[-1].at_s, [], TAIL_S)
    tally = run.tally
    return Found(
        case=case,
        cached=tally.cached_share,
        most_cached=_most_cached(arrivals),
        first_token_s=(tally.first_token.quantile(0.5), tally.first_token.quantile(0.99)),
        busy=run.busy,
        num_ended=tally.num_ended,
        num_arrived=tally.num_arrived,
        took_s=time.process_time() - began_s,
    )


def _most_cached(arrivals: list[Arrival]) -> float:
    seen: set[int] = set()
    num_cached = 0
    for arrival in arrivals:
        num_cached += sum(block in seen for block in arrival.prefix)
        seen.update(arrival.prefix)
    return num_cached / sum(len(arrival.prefix) for arrival in arrivals)


def main() -> int:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="256,1000", help="numbers of targets, by commas")
    parser.add_argument("--chats-per-target", type=float, default=8.0, help="chats that run at once")
    parser.add_argument("--popular", default="0", help="shares of the chats with one first question, by commas")
    parser.add_argument("--processes", type=int, default=2, help="simulations at once")
    options = parser.parse_args()
    cases = [
        Case(num, options.chats_per_target, by_chat, popular)
        for num in map(int, options.targets.split(","))
        for popular in map(float, options.popular.split(","))
        for by_chat in (False, True)
    ]
    print(
        "| targets | chats | popular | requests go | cached | at most | TTFT p50 ms | p99 ms | busy | simulated in s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(options.processes) as pool:
        for found in pool.map(partial(simulate, made_of=parts()), cases):
            case, (median_s, late_s) = found.case, found.first_token_s
            if found.num_ended != found.num_arrived:
                print(f"only {found.num_ended} of {found.num_arrived} requests ended")
            num = round(case.chats_per_target * case.num_targets)
            print(
                f"| {case.num_targets} | {num:,} | {case.popular:.0%} | {'by chat' if case.by_chat else 'in turn'} "
                f"| {found.cached:.1%} | {found.most_cached:.1%} | {1e3 * median_s:.0f} | {1e3 * late_s:.0f} "
                f"| {found.busy:.0%} | {found.took_s:.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
