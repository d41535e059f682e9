"""Tunes a pair for each placement of its draft, and orders the results by speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.commands.tune.advice import Advice, advise
from specdec.commands.tune.prediction import Measurements, pick
from specdec.commands.tune.probe_processes import ProbePlacement, Questions, measure_pair, places
from specdec.commands.tune.verification import verify, with_outside
from specdec.commands.up.plan import Placement

PlacementWish = Literal["auto", "apart", "together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Result for a placement."""

    where: ProbePlacement
    measured: Measurements
    advice: Advice
    tokens_per_s: float
    """Decoding speed with the advice, measured or else predicted: geometric mean over temperatures and loads."""


def tune_placements(
    questions: Questions,
    device: str,
    wish: PlacementWish,
    modes: Sequence[str],
    repeats: int,
    tell: Callable[[str], None],
) -> list[Tuned]:
    """Measure, choose, and verify with `repeats` runs (0: none), for each placement; the fastest comes first.

    `auto` tries both placements on CPU, and only apart on GPUs.

    Raises ClusterFailed and the typed errors of `specdec.wire.errors`.
    """
    names: tuple[Placement, ...] = ("apart", "together") if wish == "auto" else (wish,)
    if wish == "auto" and places(device).target_device != "cpu":
        names = ("apart",)
    found: list[Tuned] = []
    for name in names:

        def say(what: str, name: Placement = name) -> None:
            tell(f"{name}: {what}" if len(names) > 1 else what)

        known = found[0].measured if found else None
        measured, where = measure_pair(questions, places(device, name), say, known)
        found.append(_tuned(questions, measured, where, modes, repeats, say))
    return sorted(found, key=lambda one: -one.tokens_per_s)


def _tuned(
    questions: Questions,
    measured: Measurements,
    where: ProbePlacement,
    modes: Sequence[str],
    repeats: int,
    tell: Callable[[str], None],
) -> Tuned:
    choice = pick(measured, questions.loads, modes)
    if repeats == 0:
        advice = advise(measured, choice, questions.loads, {})
        return Tuned(where=where, measured=measured, advice=advice, tokens_per_s=speed(measured, advice, {}))
    verified = verify(questions, where, measured, choice, repeats, tell)
    measured = with_outside(measured, verified)
    advice = advise(measured, choice, questions.loads, verified.speedups, verified.between_ms)
    return Tuned(
        where=where, measured=measured, advice=advice, tokens_per_s=speed(measured, advice, verified.tokens_per_s)
    )


def speed(measured: Measurements, advice: Advice, tokens_per_s: Mapping[tuple[float, int], float]) -> float:
    """Tokens per second with the advice, from the speeds with speculation at each temperature and load."""
    rates = []
    for point in advice.points:
        rate = tokens_per_s.get((point.temperature, point.load))
        if rate is None:
            rate = 1e3 * point.load / measured.target.of(point.load, 1) * point.known
        rates.append(rate if advice.speculate else rate / point.known)
    return statistics.geometric_mean(rates)


def apart(found: Sequence[Tuned]) -> Tuned:
    """The result with the draft apart, as in pods; the first result if there is none."""
    return next((one for one in found if one.where.placement == "apart"), found[0])
