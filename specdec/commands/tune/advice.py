"""Advice from measurements: whether to speculate, with which settings, and why not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.commands.tune.measured import StepTimes, agreement_share
from specdec.commands.tune.prediction import (
    DRAFT_TOKENS,
    Measurements,
    SettingsChoice,
    best_length,
    expected_speedup,
    predict,
)

PAYS = 1.0
"""Speed-up above which speculation pays."""
_LOW_ACCEPTANCE = 0.5
"""Acceptance below which it is named as a cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One load at one temperature."""

    temperature: float
    load: int
    predicted: float
    measured: float | None = None
    """None: not measured."""
    between_ms: tuple[float, float] | None = None
    """Milliseconds between steps in serving, with speculation and without; None: not measured."""

    @property
    def known(self) -> float:
        """The measured speed-up, else the predicted one."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice of `specdec tune`."""

    choice: SettingsChoice
    points: Sequence[LoadPoint]
    speculate: bool
    reasons: Sequence[str]
    """Sentences with numbers."""


def advise(
    measured: Measurements,
    choice: SettingsChoice,
    loads: Sequence[int],
    verified: Mapping[tuple[float, int], float],
    between_ms: Mapping[tuple[float, int], tuple[float, float]] | None = None,
) -> Advice:
    """Advise whether to speculate with a choice, by measured speed-ups (`verified`), else by predicted ones.

    Mappings are by temperature and load.
    """
    points = [
        LoadPoint(
            temperature=temperature,
            load=load,
            predicted=expected_speedup(measured, choice, temperature, load),
            measured=verified.get((temperature, load)),
            between_ms=(between_ms or {}).get((temperature, load)),
        )
        for temperature in measured.outputs
        for load in loads
    ]
    pays = [point for point in points if point.known > PAYS]
    # One setting serves all loads, so the product over them must gain.
    speculate = bool(pays) and math.prod(point.known for point in points) > PAYS
    reasons = []
    if pays:
        best = max(pays, key=lambda point: point.known)
        place = f"with {_at_once(best.load)} at temperature {best.temperature:g}"
        ratio = f"{best.known:.2f} times plain decoding{_told(best)}"
        if speculate:
            reasons.append(f"Speculation pays: {ratio}, {place}.")
        else:
            reasons.append(f"Speculation pays {place} ({ratio}), and loses more elsewhere.")
    for point in points:
        if point not in pays:
            causes = "; ".join(why_not(measured, choice, point))
            where = f"{_at_once(point.load)} at temperature {point.temperature:g}"
            loss = f"{point.known:.2f} times plain{_told(point)}"
            reasons.append(f"Speculation does not pay with {where} ({loss}): {causes}.")
    return Advice(choice=choice, points=points, speculate=speculate, reasons=reasons)


def why_not(measured: Measurements, choice: SettingsChoice, point: LoadPoint) -> list[str]:
    """Causes why speculation does not pay at a point, with numbers."""
    load, temperature = point.load, point.temperature
    choice = best_length(measured, choice, temperature, load)
    now = predict(measured, choice, temperature, load)
    acceptance = agreement_share(measured.outputs[temperature], choice.mode)
    step_ms, draft_ms = measured.target.of(load, 1), now.draft_ratio * measured.target.of(load, 1)
    # All predictions are scaled by the ratio of measured to predicted speed-up.
    missing = point.known / now.expected
    found = []

    longest = dataclasses.replace(choice, draft_tokens=DRAFT_TOKENS[-1])
    if expected_speedup(_free_draft(measured), longest, temperature, load) * missing > PAYS:
        found.append(
            f"draft too slow: its step takes {draft_ms:.3g} ms, {now.draft_ratio:.2f} of a target step of {step_ms:.3g}"
        )
    if acceptance < _LOW_ACCEPTANCE:
        found.append(
            f"acceptance too low: {acceptance:.0%} of draft tokens are accepted, so rounds of {choice.draft_tokens} "
            f"commit {now.tokens_per_round:.2f} tokens"
        )
    alone = predict(measured, choice, temperature, 1)
    if load > 1 and (now.verify_ratio > 1.1 * alone.verify_ratio or now.expected < 0.9 * alone.expected):
        found.append(
            f"batch too large: verifying makes a step {now.verify_ratio:.2f} times as long (alone: "
            f"{alone.verify_ratio:.2f} times), because the device is busy already"
        )
    if missing < 1 and now.expected > PAYS:
        with_it, plain = point.between_ms or (0.0, 0.0)
        numbers = f" ({with_it:.3g} ms a step, plain {plain:.3g})" if with_it > plain else ""
        found.append(
            f"step too short: a target step takes {step_ms:.3g} ms, and messages between processes{numbers} cost more "
            "than a proposal saves"
        )
    if not found:
        found.append(
            f"verifying costs too much: a step over {choice.num_rows} rows takes {now.verify_ratio:.2f} times one "
            f"over a single row, for {now.tokens_per_round:.2f} tokens"
        )
    return found


def _free_draft(measured: Measurements) -> Measurements:
    free = {count: dict.fromkeys(rows, 1e-6) for count, rows in measured.draft.ms.items()}
    outside = dataclasses.replace(measured.outside, drafting_ms={})
    return dataclasses.replace(measured, draft=StepTimes(free), outside=outside)


def _at_once(load: int) -> str:
    return "one request" if load == 1 else f"{load} requests at once"


def _told(point: LoadPoint) -> str:
    return ", predicted" if point.measured is None else f", measured; predicted {point.predicted:.2f}"
