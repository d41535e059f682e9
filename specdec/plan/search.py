"""The cheapest deployment that holds the objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from specdec.plan.deployment import MOST_BATCH, Deployment, Placement, Question, placements
from specdec.plan.inputs.devices import PlanImpossible
from specdec.plan.simulation.curve import ReplicaCurve, measure_curve
from specdec.plan.simulation.faults import Scope
from specdec.plan.simulation.pair import Speculation
from specdec.plan.trial import Figures, Kind, Trials

_DRAWS = 400
_MOST_TARGETS = 100_000
_MOST_TIMES, _FEW_TARGETS = 20, 64
"""Factor over a kind's least number of targets, and a number, above both of which more targets are not tried."""
_MORE = 1.08
"""Factor to the next number of targets that is tried, in large fleets."""
_WORTH_TRYING = 1.02
"""Factor over the best price so far up to which a kind's least price makes it worth a trial: estimates are rough."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A kind of replica that was looked at."""

    label: str
    least: int
    """Targets by its throughput alone."""
    num_targets: int | None
    """Targets that hold the objectives; None: not tried, as it costs more, or cannot hold them."""
    price: float
    """Dollars per hour: of the least number, or of what holds."""
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan."""

    kind: Kind
    deployment: Deployment
    figures: Figures
    """Undisturbed."""
    with_loss: dict[Scope, Figures]
    rolled: Figures | None
    """While targets are replaced one after the other; None: there is one."""
    tried: Sequence[Tried] = field(default_factory=tuple)


def search(
    question: Question,
    trials: Trials,
    speculation: Speculation,
    seeds: Sequence[int],
    tell: Callable[[str], None] = lambda what: None,
) -> Found:
    """Try kinds of replicas by price, each with as few targets as hold. Raises PlanImpossible, with what is."""
    options = [_estimated(question, trials, placement, speculation, tell) for placement in placements(question)]
    possible = [option for option in options if option.least is not None]
    if not possible:
        raise _impossible(options, trials)
    possible.sort(key=lambda option: option.price)
    tried: list[Tried] = []
    least_of_all = min(option.least or 1 for option in possible)
    if least_of_all > _MOST_TARGETS:
        raise PlanImpossible(
            f"this load takes about {least_of_all} targets, and {_MOST_TARGETS} are planned at most: plan a part of it"
        )
    best: tuple[float, Kind, int] | None = None
    for option in possible:
        label, least = option.kind.placement.label, option.least or 1
        if best is not None and option.price > best[0] * _WORTH_TRYING:
            tried.append(Tried(label, least, None, option.price, "costs more"))
            continue
        most = min(_MOST_TARGETS, max(_FEW_TARGETS, _MOST_TIMES * least))
        if best is not None:
            most = min(most, math.ceil(best[0] / option.kind.placement.price))
        num = _fewest(trials, option.kind, least, most, seeds[0], partial(_tell, tell, label))
        if num is None:
            tried.append(Tried(label, least, None, option.price, "does not hold the objectives at a lower price"))
            continue
        price = num * option.kind.placement.price
        tried.append(Tried(label, least, num, price))
        if best is None or price < best[0]:
            best = (price, option.kind, num)
    if best is None:
        raise _impossible(options, trials)
    _, kind, num = best
    figures = _figures(trials, kind, num, seeds, None, tell)
    return Found(
        kind=kind,
        deployment=trials.deployment(kind, num, figures),
        figures=figures,
        with_loss={scope: _figures(trials, kind, num, seeds, scope, tell) for scope in trials.scopes_of(kind)},
        rolled=_figures(trials, kind, num, seeds, None, tell, is_rolled=True) if num > 1 else None,
        tried=tried + [Tried(o.kind.placement.label, 0, None, 0.0, o.why_not) for o in options if o.least is None],
    )


@dataclass(frozen=True, slots=True)
class _Option:
    kind: Kind
    least: int | None
    price: float
    why_not: str = ""
    best_gap_s: float = 0.0
    """99th percentile of the time between tokens with one session."""
    best_first_s: float = 0.0
    """Time of a prompt at the 99th percentile, on an idle target."""


def _estimated(
    question: Question, trials: Trials, placement: Placement, speculation: Speculation, tell: Callable[[str], None]
) -> _Option:
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
    objectives = trials.objectives
    if placement.kv_tokens < prompt + output:
        return _Option(kind, None, math.inf, "its memory holds no request of the mean length", gap_s, first_s)
    if gap_s > objectives.inter_token_s or first_s > objectives.first_token_s:
        why = f"alone on a target, a long prompt takes {first_s * 1e3:.0f} ms and a token {gap_s * 1e3:.1f} ms"
        return _Option(kind, None, math.inf, why, gap_s, first_s)
    loads = [load for load in range(1, most + 1) if gap_p99(curve, load) <= objectives.inter_token_s]
    rates = [
        load / curve.mean(load, lambda p: p.mean_turn_s) * curve.mean(load, lambda p: p.mean_tokens) for load in loads
    ]
    request_s = output / max(rates) + prompt_s(kind, prompt)
    least = max(1, math.ceil(trials.traffic.per_s * request_s))
    return _Option(kind, least, least * placement.price, "", gap_s, first_s)


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


def _tell(tell: Callable[[str], None], label: str, what: str) -> None:
    tell(f"{label}: {what}")


def _fewest(trials: Trials, kind: Kind, least: int, most: int, seed: int, tell: Callable[[str], None]) -> int | None:
    """The fewest targets that hold the objectives, at most `most`; None: they would be more."""
    num, below = max(least, least_targets(trials.scopes, kind, trials.num_zones)), 0
    while num <= most:
        tell(f"{num} targets")
        if trials.holds(kind, num, seed):
            break
        below, num = num, max(num + 1, round(num * _MORE))
    else:
        return None
    while num - below > max(1, num // 50) and below >= least:
        middle = (num + below) // 2
        tell(f"{middle} targets")
        if trials.holds(kind, middle, seed):
            num = middle
        else:
            below = middle
    return num


def least_targets(scopes: Sequence[Scope], kind: Kind, num_zones: int) -> int:
    """The fewest targets of which some are left after each loss."""
    least = 1
    for scope in scopes:
        if scope is Scope.REPLICA:
            least = max(least, 2)
        else:
            least = max(least, kind.placement.per_node + 1)
    return max(least, num_zones) if Scope.ZONE in scopes else least


def _figures(
    trials: Trials,
    kind: Kind,
    num: int,
    seeds: Sequence[int],
    scope: Scope | None,
    tell: Callable[[str], None],
    *,
    is_rolled: bool = False,
) -> Figures:
    runs, scale = [], 1.0
    situation = "rolling update" if is_rolled else scope or "undisturbed"
    for number, seed in enumerate(seeds, 1):
        tell(f"{num} targets, {situation}: run {number} of {len(seeds)}")
        run, scale = trials.run(kind, num, seed, scope, is_rolled=is_rolled)
        runs.append(run)
    return Figures.of(runs, scale)


def _impossible(options: Sequence[_Option], trials: Trials) -> PlanImpossible:
    gap = min(options, key=lambda option: option.best_gap_s)
    first = min(options, key=lambda option: option.best_first_s)
    objectives = trials.objectives
    if any(option.least is not None for option in options):
        where = f" with {' or '.join(trials.scopes)} gone" if trials.scopes else ""
        cause = f"this traffic at any tried number of targets{where}, though a target alone would"
    else:
        cause = "a single request"
    return PlanImpossible(
        f"no deployment holds {objectives.first_token_s * 1e3:g} ms to the first token and "
        f"{objectives.inter_token_s * 1e3:g} ms between tokens (p99) for {cause}: possible are at best "
        f"{first.best_first_s * 1e3:.3g} ms ({first.kind.placement.label}) and {gap.best_gap_s * 1e3:.3g} ms "
        f"({gap.kind.placement.label}), each alone and without load"
    )
