"""Kinds of replicas by estimates: what a target alone can do, and how many targets the throughput takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from specdec.plan.deployment import MOST_BATCH, Placement, Question
from specdec.plan.inputs.devices import PlanImpossible
from specdec.plan.kind import Kind
from specdec.plan.simulation.curve import ReplicaCurve, measure_curve
from specdec.plan.simulation.pair import Speculation
from specdec.plan.simulation.tally import Interval
from specdec.plan.trial import Trials

_DRAWS = 400


@dataclass(frozen=True, slots=True)
class Option:
    """A kind of replica with what is known of it before any fleet is simulated."""

    kind: Kind
    least: int | None
    """Targets by its throughput alone; None: it cannot hold the objectives."""
    tokens_per_s: float
    """Of one stream on an idle target."""
    why_not: str = ""
    best_gap_s: float = 0.0
    """99th percentile of the time between tokens with one session."""
    best_first_s: float = 0.0
    """Time of a prompt at the 99th percentile, on an idle target."""


def estimated(
    question: Question,
    trials: Trials,
    placement: Placement,
    speculation: Speculation,
    tell: Callable[[str], None] = lambda what: None,
) -> Option:
    """Measure a kind's curves, and estimate how many targets it takes."""
    prompt, output = trials.traffic.mean_tokens
    long_prompt = trials.traffic.prompt_quantile(0.99)
    pair = placement.pair(question)
    most = max(1, min(MOST_BATCH, int(placement.kv_tokens // (prompt + output))))

    def told(what: str) -> None:
        tell(f"{placement.label}: {what}")

    plain = measure_curve(pair, Speculation.OFF, output, most)
    curve = plain if placement.draft_steps is None else measure_curve(pair, speculation, output, most, tell=told)

    @cache
    def crowded(share: float) -> ReplicaCurve:
        told(f"with {share:.0%} of the drafts")
        shared = replace(pair, targets_per_draft=placement.targets_per_draft / share)
        return measure_curve(shared, speculation, output, most)

    is_apart = placement.draft_device is not None
    kind = Kind(placement=placement, curve=curve, plain=plain, crowded=crowded if is_apart else None)
    gap_s, first_s = gap_p99(curve, 1), prompt_s(kind, long_prompt)
    alone = curve.mean(1, lambda p: p.mean_tokens) / curve.mean(1, lambda p: p.mean_turn_s)
    objectives = trials.objectives
    if placement.kv_tokens < prompt + output:
        return Option(kind, None, alone, "its memory holds no request of the mean length", gap_s, first_s)
    if gap_s > objectives.inter_token_s or first_s > objectives.first_token_s:
        why = f"alone on a target, a long prompt takes {first_s * 1e3:.0f} ms and a token {gap_s * 1e3:.1f} ms"
        return Option(kind, None, alone, why, gap_s, first_s)
    loads = [load for load in range(1, most + 1) if gap_p99(curve, load) <= objectives.inter_token_s]
    rates = [
        load / curve.mean(load, lambda p: p.mean_turn_s) * curve.mean(load, lambda p: p.mean_tokens) for load in loads
    ]
    request_s = output / max(rates) + prompt_s(kind, prompt)
    least = max(1, math.ceil(trials.traffic.per_s * request_s))
    return Option(kind, least, alone, "", gap_s, first_s)


def gap_p99(curve: ReplicaCurve, num_sessions: int) -> float:
    """99th percentile of the time per token at a load, once per token, without prompts beside it."""
    rng = np.random.default_rng(1)
    turns_s = np.array([curve.turn_s(num_sessions, rng) for _ in range(_DRAWS)])
    tokens = curve.tokens(num_sessions, _DRAWS, rng)
    gaps = np.repeat(turns_s / tokens, tokens)
    return float(np.quantile(gaps, 0.99))


def prompt_s(kind: Kind, prompt: float, num_sessions: int = 0) -> float:
    """Seconds of a prompt's chunks on a target, beside `num_sessions` that decode."""
    settings = kind.settings()
    whole, rest = divmod(round(prompt), settings.max_batch_tokens)
    of_rest_s = settings.steps.prompt_seconds(rest, num_sessions) if rest else 0.0
    return whole * settings.steps.prompt_seconds(settings.max_batch_tokens, num_sessions) + of_rest_s


def impossible(options: Sequence[Option], trials: Trials) -> PlanImpossible:
    """No option holds: the message says what is possible."""
    gap = min(options, key=lambda option: option.best_gap_s)
    first = min(options, key=lambda option: option.best_first_s)
    objectives = trials.objectives
    if any(option.least is not None for option in options):
        where = f" with {' or '.join(trials.scopes)} gone" if trials.scopes else ""
        cause = f"this traffic at any tried number of targets{where}, though a target alone would"
    else:
        cause = "a single request"
    first_ms, gap_ms = Interval(first.best_first_s, 0.0).text(1e3), Interval(gap.best_gap_s, 0.0).text(1e3)
    return PlanImpossible(
        f"no deployment holds {objectives.first_token_s * 1e3:g} ms to the first token and "
        f"{objectives.inter_token_s * 1e3:g} ms between tokens (p99) for {cause}: possible are at best "
        f"{first_ms} ms ({first.kind.placement.label}) and {gap_ms} ms ({gap.kind.placement.label}), each alone "
        "and without load"
    )
