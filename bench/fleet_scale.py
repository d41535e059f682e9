"""What grows with a fleet: simulated loads and losses, and counts of messages, up to a thousand targets.

    python -m bench.fleet_scale --markdown bench/results/fleet-scale.md

The fleets decode a 70B model on four H200 each, by the roofline; all figures of them are predictions. The time of a
choice of a target is measured here, with the coordinator's own router. Counts follow from the services' intervals.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simpy

from specdec.coordinator.replicas.load import usable
from specdec.coordinator.replicas.outliers import EjectionSettings, OutlierDetector
from specdec.coordinator.replicas.router import PrefixRouter
from specdec.plan.inputs.devices import device_named
from specdec.plan.inputs.models import ModelSizes
from specdec.plan.inputs.step_times import Roofline
from specdec.plan.inputs.traffic import Lengths, Rate
from specdec.plan.simulation.coordinator import CoordinatorSettings, TargetView
from specdec.plan.simulation.curve import ReplicaCurve, measure_curve
from specdec.plan.simulation.faults import Loss, Scope
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetSimulation
from specdec.plan.simulation.pair import PairSettings, Speculation
from specdec.plan.simulation.tally import RunTally
from specdec.plan.simulation.target import SimulatedTarget, TargetSettings
from specdec.store.interface import StoreLimits

STREAMS = 200
"""Streams of a target."""
OUTPUT = 400
DRAFTS_PER_TARGET, TARGETS_PER_COORDINATOR = 3, 10
_REPORTS_PER_S = 4.0
_RENEWALS_PER_S = 3 / 15
_READS_PER_S = 1 / 5
"""Of the registry, by each coordinator (`discovery_s`)."""
_RECORD_BYTES = 400
"""Of a replica in the registry: identity, address, load."""
_PICKS = 20
TARGET = ModelSizes(name="70B", hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128,
                    vocab=128256, max_len=8192)  # fmt: skip
DRAFT = ModelSizes(name="1B", hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_dim=64,
                   vocab=128256, max_len=8192)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """Figures of one fleet."""

    num_targets: int
    links: int
    num_streams: int
    first_token_p99_s: float
    inter_token_p99_s: float
    imbalance: float
    """Sessions of the fullest target over the mean."""
    served: float
    lost_first_token_p99_s: float
    """With one of three zones lost at a fifth of the run."""
    lost_served: float
    pick_s: float
    """Measured time of a coordinator's choice of a target."""
    took_s: float
    """Time that both simulations took here."""


def curves() -> tuple[TargetSettings, float]:
    """A target's settings, and the streams per second that hold it at `STREAMS` streams."""
    gpu = device_named("H200")
    steps = Roofline(TARGET, gpu, 4, 700)
    draft = Roofline(DRAFT, device_named("H100"), 1, 700)
    pair = PairSettings(
        target=steps, draft=draft, acceptance=[0.8, 0.78, 0.76], targets_per_draft=1 / DRAFTS_PER_TARGET, delay_s=2e-4
    )
    most = 256
    curve: ReplicaCurve = measure_curve(pair, Speculation.ADAPTIVE, OUTPUT, most)
    plain = measure_curve(pair, Speculation.OFF, OUTPUT, most)
    settings = TargetSettings(
        curve=curve,
        plain=plain,
        steps=steps,
        kv_tokens=float(steps.kv_tokens),
        max_sessions=most,
        max_batch_seqs=most,
        max_batch_tokens=2048,
    )
    turn_s = curve.mean(STREAMS, lambda point: point.mean_turn_s)
    tokens = curve.mean(STREAMS, lambda point: point.mean_tokens)
    return settings, STREAMS / (OUTPUT * turn_s / tokens)


def fleet(
    settings: TargetSettings, per_s: float, num_targets: int, links: int, seconds: float, share: float
) -> ScaleRow:
    """Simulate a fleet undisturbed and with a zone lost; `share`: its load over `STREAMS` streams for each target."""
    num_coordinators = max(2, num_targets // TARGETS_PER_COORDINATOR)
    plan = FleetPlan(
        num_targets=num_targets,
        num_coordinators=num_coordinators,
        target=settings,
        coordinator=CoordinatorSettings(
            max_running=round(1.5 * STREAMS * num_targets / num_coordinators), max_waiting=10_000, shed_after_s=2.0
        ),
        targets_per_node=2,
        num_zones=3,
        links_per_coordinator=links,
    )
    traffic = Rate(per_s=share * per_s * num_targets, prompts=Lengths(500, 0.5), outputs=Lengths(OUTPUT, 0.5))
    began_s = time.perf_counter()
    calm = FleetSimulation(plan, Clients(), 1).run(traffic.arrivals(seconds, 1), seconds)
    loss = Loss(scope=Scope.ZONE, at_s=seconds / 5, down_s=10 * seconds)
    lost = FleetSimulation(plan, Clients(), 1).run(traffic.arrivals(seconds, 1), seconds, [loss])
    return ScaleRow(
        num_targets=num_targets,
        links=links,
        num_streams=round(calm.mean_sessions),
        first_token_p99_s=calm.tally.first_token.quantile(0.99),
        inter_token_p99_s=calm.tally.inter_token.quantile(0.99),
        imbalance=calm.most_sessions * num_targets / max(1.0, calm.mean_sessions),
        served=calm.tally.served_share,
        lost_first_token_p99_s=lost.tally.first_token.quantile(0.99),
        lost_served=lost.tally.served_share,
        pick_s=pick_s(settings, links),
        took_s=time.perf_counter() - began_s,
    )


def pick_s(settings: TargetSettings, num_targets: int) -> float:
    """Measured seconds of a choice among targets."""
    env, tally = simpy.Environment(), RunTally()
    targets = [
        SimulatedTarget(
            name=f"t{number}", node="n", zone="z", env=env, settings=settings, tally=tally, rng=np.random.default_rng(1)
        )
        for number in range(num_targets)
    ]
    ejections, router = OutlierDetector(EjectionSettings(), clock=lambda: 0.0), PrefixRouter()
    views = [TargetView(target, ejections.standing) for target in targets]
    began_s = time.process_time()
    for _ in range(_PICKS):
        router.pick_link(usable(views), [], 0.0)
    return (time.process_time() - began_s) / _PICKS


def markdown(rows: list[ScaleRow]) -> str:
    """The page."""
    lines = [
        "# What grows with a fleet",
        "",
        "**Predictions** by `python -m bench.fleet_scale`, but for the times of a choice and of the simulation, which "
        "are measured. 70B on four H200 each by the roofline, three 1B drafts for each target, acceptance 0.8, prompts "
        f"of 500 tokens and outputs of {OUTPUT}; a coordinator for {TARGETS_PER_COORDINATOR} targets; three zones.",
        "",
        "| targets | links of a coordinator | streams | TTFT p99 ms | ITL p99 ms | fullest / mean | served | "
        "a zone lost: TTFT p99 ms | served | choice, ms | simulated in s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.num_targets} | {row.links} | {row.num_streams} | {row.first_token_p99_s * 1e3:.0f} | "
        f"{row.inter_token_p99_s * 1e3:.0f} | {row.imbalance:.2f} | {row.served:.1%} | "
        f"{row.lost_first_token_p99_s * 1e3:.0f} | {row.lost_served:.1%} | {row.pick_s * 1e3:.2f} | {row.took_s:.0f} |"
        for row in rows
    ]
    lines += [
        "",
        "## Messages and records",
        "",
        "| targets | streams between services | a coordinator: load reports per second | loads passed on to drafts | "
        f"registry: records (of {StoreLimits().max_replicas}) | writes per second | MB read per second |",
        "|---|---|---|---|---|---|---|",
    ]
    for num in sorted({row.num_targets for row in rows}):
        drafts, coordinators = DRAFTS_PER_TARGET * num, max(2, num // TARGETS_PER_COORDINATOR)
        replicas, records = num + drafts, num + drafts + coordinators
        read = coordinators * _READS_PER_S * records * _RECORD_BYTES / 1e6
        lines.append(
            f"| {num} | {coordinators * replicas:,} | {_REPORTS_PER_S * replicas:,.0f} | "
            f"{_REPORTS_PER_S * num * drafts:,.0f} | {records:,} | {_RENEWALS_PER_S * records:,.0f} | {read:,.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Simulate, and print the page or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="file for the page; without it the page is printed")
    parser.add_argument("--targets", default="10,100,1000", help="numbers of targets, by commas")
    parser.add_argument("--links", default="0,32", help="links of each coordinator, by commas; 0: to all targets")
    parser.add_argument("--seconds", type=float, default=40.0, help="simulated seconds")
    parser.add_argument("--share", type=float, default=0.75, help="load over what 200 streams for each target are")
    options = parser.parse_args()
    settings, per_s = curves()
    rows = []
    for num in map(int, options.targets.split(",")):
        for links in map(int, options.links.split(",")):
            if not links or links < num:
                rows.append(fleet(settings, per_s, num, links or num, options.seconds, options.share))
                print(rows[-1], flush=True)
    text = markdown(rows)
    if options.markdown:
        options.markdown.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
