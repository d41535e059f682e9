"""From measurements to settings: what to set, whether to speculate at all, and why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.tuning.measured import StepTimes, agreement_share
from specdec.tuning.prediction import Choice, Measurements, candidates, mean_speedup, predict

PAYS = 1.0
"""A speed-up above it is worth having."""
_OTHER_MODE_GAIN = 1.1
"""Coupled mode promises the same tokens as plain decoding; what gives that up must be faster by so much."""
_LOW_ACCEPTANCE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load at one temperature."""

    temperature: float
    load: int
    predicted: float
    measured: float | None = None
    """None: it was not."""

    @property
    def known(self) -> float:
        """What was measured counts for more than what was predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What `specdec tune` says."""

    choice: Choice
    points: Sequence[Point]
    speculate: bool
    reasons: Sequence[str]
    """Sentences with numbers."""


def pick(measured: Measurements, loads: Sequence[int], modes: Sequence[str]) -> Choice:
    """The choice with the highest mean speed-up; another mode than coupled only where that gains a tenth."""
    best = {
        mode: max(candidates(measured, (mode,)), key=lambda choice: mean_speedup(measured, choice, loads))
        for mode in modes
    }
    if "coupled" not in best:
        return best[modes[0]]
    usual = best["coupled"]
    bar = _OTHER_MODE_GAIN * mean_speedup(measured, usual, loads)
    return max(
        best.values(),
        key=lambda choice: (choice is usual or mean_speedup(measured, choice, loads) > bar, choice is not usual),
    )


def advise(
    measured: Measurements, choice: Choice, loads: Sequence[int], verified: Mapping[tuple[float, int], float]
) -> Advice:
    """Whether to speculate with a choice, by the speed-ups that were measured (`verified`) or else predicted."""
    points = [
        Point(
            temperature=temperature,
            load=load,
            predicted=predict(measured, choice, temperature, load).expected,
            measured=verified.get((temperature, load)),
        )
        for temperature in measured.outputs
        for load in loads
    ]
    pays = [point for point in points if point.known > PAYS]
    reasons = []
    if pays:
        best = max(pays, key=lambda point: point.known)
        reasons.append(
            f"Speculation pays: {best.known:.2f} times plain decoding with {_at_once(best.load)} at temperature "
            f"{best.temperature:g}{_told(best)}."
        )
    for point in points:
        if point not in pays:
            reasons += why_not(measured, choice, point)
    # One setting for all: on the whole it must not lose.
    product = 1.0
    for point in points:
        product *= point.known
    return Advice(choice=choice, points=points, speculate=bool(pays) and product > PAYS, reasons=reasons)


def why_not(measured: Measurements, choice: Choice, point: Point) -> list[str]:
    """Why speculation does not pay at a point: the causes whose removal alone would make it pay, with the numbers."""
    load, temperature = point.load, point.temperature
    now = predict(measured, choice, temperature, load)
    acceptance = agreement_share(measured.outputs[temperature], choice.mode)
    step_ms, draft_ms = measured.target.of(load, 1), now.draft_ratio * measured.target.of(load, 1)
    # What was measured may be less than predicted: then all that was predicted is scaled by what is missing.
    missing = point.known / now.expected
    where = f"with {_at_once(load)} at temperature {temperature:g}"
    found = []

    def would_pay(other: Measurements) -> bool:
        best = max(predict(other, one, temperature, load).expected for one in candidates(other, (choice.mode,)))
        return best * missing > PAYS

    if would_pay(_free_draft(measured)):
        found.append(
            f"draft too slow: its step takes {draft_ms:.3g} ms, {now.draft_ratio:.2f} of a target step of {step_ms:.3g}"
        )
    if acceptance < _LOW_ACCEPTANCE:
        found.append(
            f"acceptance too low: {acceptance:.0%} of its tokens are right: a round of {choice.draft_tokens} commits "
            f"{now.tokens_per_round:.2f} tokens"
        )
    alone = predict(measured, choice, temperature, 1)
    if load > 1 and (now.verify_ratio > 1.1 * alone.verify_ratio or now.expected < 0.9 * alone.expected):
        found.append(
            f"batch too large: verifying makes a step {now.verify_ratio:.2f} times as long (alone: {alone.verify_ratio:.2f} "
            "times), as the device is busy already"
        )
    if missing < 1 and now.expected > PAYS:
        found.append(
            f"step too short: a target step takes {step_ms:.3g} ms, and what passes between processes for a proposal costs "
            f"more than it saves (predicted {now.expected:.2f} times without that, measured {point.known:.2f})"
        )
    if not found:
        found.append(
            f"verifying costs too much: a step over {choice.num_rows} rows takes {now.verify_ratio:.2f} times one "
            f"over a single row, for {now.tokens_per_round:.2f} tokens"
        )
    return [f"It does not pay {where} ({point.known:.2f} times plain{_told(point)}). {cause[0].upper()}{cause[1:]}."
            for cause in found]  # fmt: skip


def _free_draft(measured: Measurements) -> Measurements:
    free = {count: dict.fromkeys(rows, 1e-6) for count, rows in measured.draft.ms.items()}
    return dataclasses.replace(measured, draft=StepTimes(free))


def _at_once(load: int) -> str:
    return "one request" if load == 1 else f"{load} requests at once"


def _told(point: Point) -> str:
    return ", predicted" if point.measured is None else f", measured; predicted {point.predicted:.2f}"
