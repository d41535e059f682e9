"""From measurements to settings: what to set, whether to speculate at all, and why not."""

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
"""A speed-up above it is worth having."""
_LOW_ACCEPTANCE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One load at one temperature."""

    temperature: float
    load: int
    predicted: float
    measured: float | None = None
    """None: it was not."""
    between_ms: tuple[float, float] | None = None
    """What passed between steps as served, with speculation and without; None: it was not measured."""

    @property
    def known(self) -> float:
        """What was measured counts for more than what was predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What `specdec tune` says."""

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
    """Whether to speculate with a choice, by the speed-ups that were measured (`verified`) or else predicted.

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
    # One setting for all: on the whole it must not lose.
    speculate = bool(pays) and math.prod(point.known for point in points) > PAYS
    reasons = []
    if pays:
        best = max(pays, key=lambda point: point.known)
        place = f"with {_at_once(best.load)} at temperature {best.temperature:g}"
        ratio = f"{best.known:.2f} times plain decoding{_told(best)}"
        if speculate:
            reasons.append(f"Speculation pays: {ratio}, {place}.")
        else:
            reasons.append(f"It pays {place} ({ratio}), and loses more elsewhere.")
    for point in points:
        if point not in pays:
            causes = "; ".join(why_not(measured, choice, point))
            where = f"{_at_once(point.load)} at temperature {point.temperature:g}"
            reasons.append(f"It does not pay with {where} ({point.known:.2f} times plain{_told(point)}): {causes}.")
    return Advice(choice=choice, points=points, speculate=speculate, reasons=reasons)


def why_not(measured: Measurements, choice: SettingsChoice, point: LoadPoint) -> list[str]:
    """Why speculation does not pay at a point: every cause that counts there, with its numbers."""
    load, temperature = point.load, point.temperature
    choice = best_length(measured, choice, temperature, load)
    now = predict(measured, choice, temperature, load)
    acceptance = agreement_share(measured.outputs[temperature], choice.mode)
    step_ms, draft_ms = measured.target.of(load, 1), now.draft_ratio * measured.target.of(load, 1)
    # What was measured may be less than predicted: then all that was predicted is scaled by what is missing.
    missing = point.known / now.expected
    found = []

    longest = dataclasses.replace(choice, draft_tokens=DRAFT_TOKENS[-1])
    if expected_speedup(_free_draft(measured), longest, temperature, load) * missing > PAYS:
        found.append(
            f"draft too slow: its step takes {draft_ms:.3g} ms, {now.draft_ratio:.2f} of a target step of {step_ms:.3g}"
        )
    if acceptance < _LOW_ACCEPTANCE:
        found.append(
            f"acceptance too low: {acceptance:.0%} of its tokens are right: rounds of {choice.draft_tokens} commit "
            f"{now.tokens_per_round:.2f} tokens"
        )
    alone = predict(measured, choice, temperature, 1)
    if load > 1 and (now.verify_ratio > 1.1 * alone.verify_ratio or now.expected < 0.9 * alone.expected):
        found.append(
            f"batch too large: verifying makes a step {now.verify_ratio:.2f} times as long (alone: "
            f"{alone.verify_ratio:.2f} times), as the device is busy already"
        )
    if missing < 1 and now.expected > PAYS:
        with_it, plain = point.between_ms or (0.0, 0.0)
        numbers = f" ({with_it:.3g} ms a step, plain {plain:.3g})" if with_it > plain else ""
        found.append(
            f"step too short: a target step takes {step_ms:.3g} ms, and what passes between processes for a proposal"
            f"{numbers} costs more than it saves"
        )
    if not found:
        found.append(
            f"verifying costs too much: a step over {choice.num_rows} rows takes {now.verify_ratio:.2f} times one "
            f"over a single row, for {now.tokens_per_round:.2f} tokens"
        )
    return found


def _free_draft(measured: Measurements) -> Measurements:
    free = {count: dict.fromkeys(rows, 1e-6) for count, rows in measured.draft.ms.items()}
    return dataclasses.replace(measured, draft=StepTimes(free))


def _at_once(load: int) -> str:
    return "one request" if load == 1 else f"{load} requests at once"


def _told(point: LoadPoint) -> str:
    return ", predicted" if point.measured is None else f", measured; predicted {point.predicted:.2f}"
