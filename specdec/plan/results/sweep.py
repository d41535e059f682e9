"""Load against latency, with speculation on, off and adaptive; and what is full first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specdec.commands.measuring.svg import PlotPoint, lines
from specdec.plan.deployment import Deployment, Question
from specdec.plan.found import Found
from specdec.plan.kind import Kind
from specdec.plan.simulation.curve import measure_curve
from specdec.plan.simulation.pair import Speculation
from specdec.plan.simulation.tally import Interval
from specdec.plan.trial import Figures, State, Trials

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Loads of the curves, over the traffic that was asked for."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """Figures at a load."""

    speculation: Speculation
    factor: float
    figures: Figures


def sweep(
    question: Question,
    trials: Trials,
    found: Found,
    chosen: Speculation,
    seeds: Sequence[int],
    tell: Callable[[str], None] = lambda what: None,
) -> list[SweepPoint]:
    """The plan's deployment at several loads, with each kind of speculation that it can have."""
    modes = list(Speculation) if found.kind.placement.draft_steps is not None else [Speculation.OFF]
    output = trials.traffic.mean_tokens[1]
    points = []
    for mode in modes:
        kind = found.kind
        if mode is not chosen and kind.placement.draft_steps is not None:
            pair = kind.placement.pair(question)
            curve = kind.plain if mode is Speculation.OFF else None
            curve = curve or measure_curve(pair, mode, output, kind.curve.most_sessions, tell=tell)
            kind = replace(kind, curve=curve)
        for factor in FACTORS:
            tell(f"{factor:.0%} of the load, speculation {mode}")
            points.append(SweepPoint(mode, factor, _at(trials, kind, found.deployment, factor, seeds)))
    return points


def _at(trials: Trials, kind: Kind, deployment: Deployment, factor: float, seeds: Sequence[int]) -> Figures:
    pairs = [trials.run(kind, deployment.num_targets, seed, State.UNDISTURBED, factor, is_rough=True) for seed in seeds]
    return Figures.of([run for run, _ in pairs], pairs[0][1])


def plots(points: Sequence[SweepPoint], note: str) -> dict[str, str]:
    """SVG by name; bars are 95 % confidence intervals over seeds."""
    wanted: dict[str, tuple[str, Callable[[Figures], Interval], float, str]] = {
        "first-token": ("Time to first token, p99", lambda f: f.first_token_p99, 1e3, "ms"),
        "inter-token": ("Time between tokens, p99", lambda f: f.inter_token_p99, 1e3, "ms"),
        "inter-token-median": ("Time between tokens, p50", lambda f: f.inter_token_p50, 1e3, "ms"),
        "goodput": ("Requests within both objectives", lambda f: f.goodput, 1.0, "requests/s"),
    }
    found = {}
    for name, (title, figure, unit, y_name) in wanted.items():
        series: dict[str, list[PlotPoint]] = {}
        for point in points:
            value = figure(point.figures)
            mark = PlotPoint(100 * point.factor, unit * value.mean, unit * value.low, unit * value.high)
            series.setdefault(f"speculation {point.speculation}", []).append(mark)
        found[name] = lines(f"{title}, predicted", note, "percent of the load", y_name, series)
    return found


@dataclass(frozen=True, slots=True)
class Use:
    """How full a part of the deployment is at the planned load."""

    part: str
    share: float


def uses(found: Found, trials: Trials) -> list[Use]:
    """Parts of the deployment by how full they are; the first one is full first as load grows."""
    deployment, kind, figures = found.deployment, found.kind, found.figures
    each = figures.sessions.mean / deployment.num_targets
    load = max(1, round(each))
    drafts = kind.curve.mean(load, lambda point: point.draft_use)
    coordinators = max(1, deployment.num_coordinators - deployment.spare)
    parts = [
        Use("targets: sequences of a step", each / kind.settings().max_batch_seqs),
        Use("targets: KV cache, highest", figures.kv_share.mean),
        Use("first token against its objective", figures.first_token_p99.mean / trials.objectives.first_token_s),
        Use(
            "time between tokens against its objective", figures.inter_token_p99.mean / trials.objectives.inter_token_s
        ),
        Use("coordinators: CPU", deployment.coordinator_cores / coordinators),
    ]
    if deployment.num_drafts:
        parts.append(Use("drafts: time", drafts))
    return sorted(parts, key=lambda use: -use.share)
