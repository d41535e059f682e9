"""Predicted speed-up of speculation, from step times and agreement.

A round commits E tokens. A serial round takes the draft's K steps and then the target's step over the round's rows; a
hidden round takes the longer of both, because the draft works on the next round meanwhile. The draft can do that only
if the verdict is one that it drafted for, so the share of such verdicts is the share of hidden rounds. Plain decoding
takes the target's step over one row. The time outside of steps is added to all.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.commands.tune.measured import Agreement, Rounds, StepTimes, rounds

DRAFT_TOKENS = tuple(range(1, 17))
SIBLINGS = (0, 1, 2)
MODES = ("coupled", "rejection")
_OTHER_MODE_GAIN = 1.1
"""Ratio to coupled mode's speed-up above which rejection mode is chosen."""
_ENOUGH = 0.99
"""Share of the best mean speed-up at which a simpler choice is taken."""
_CHEAP_ROW = 1.5
"""Ratio of a draft step of two rows to one row below which a second head pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideSteps:
    """Milliseconds that services add to the engines' own times, by requests at once; empty: nothing is known."""

    plain_ms: Mapping[int, float] = field(default_factory=dict)
    """Between two steps of the target in plain decoding."""
    verifying_ms: Mapping[int, float] = field(default_factory=dict)
    """Between two steps with speculation, without waits for the draft."""
    drafting_ms: Mapping[int, float] = field(default_factory=dict)
    """Of a draft's step, beyond the engine's own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of one pair on one machine."""

    target: StepTimes
    draft: StepTimes
    """Steps of one row per sequence; a tree with two heads is two sequences."""
    outputs: Mapping[float, Sequence[Agreement]]
    """Agreement by temperature."""
    target_prompt_ms: Mapping[int, float] = field(default_factory=dict)
    """Milliseconds of a step over one prompt's chunk, by its tokens."""
    draft_prompt_ms: Mapping[int, float] = field(default_factory=dict)
    is_parallel: bool = True
    """Whether draft and target run at the same time, on their own devices or cores."""
    outside: OutsideSteps = field(default_factory=OutsideSteps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChoice:
    """Settings that are tuned."""

    draft_tokens: int
    num_siblings: int = 0
    max_heads: int = 1
    mode: str = "coupled"

    @property
    def num_rows(self) -> int:
        """Rows of the target's step per session."""
        return 1 + self.draft_tokens * (1 + self.num_siblings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPrediction:
    """Speed-ups over plain decoding, and their parts."""

    serial: float
    hidden: float
    expected: float
    tokens_per_round: float
    draft_ratio: float
    """c: a draft step over a plain target step."""
    verify_ratio: float
    """v: a target step over the round's rows, over one of one row."""
    rounds: Rounds


def predict(measured: Measurements, choice: SettingsChoice, temperature: float, load: int) -> SpeedPrediction:
    """Prediction for a choice at a temperature with `load` requests at once."""
    num_siblings = choice.num_siblings if choice.mode == "coupled" else 0
    one_round = rounds(measured.outputs[temperature], choice.mode, choice.draft_tokens, num_siblings)
    between, verifying = (_at(ms, load) for ms in (measured.outside.plain_ms, measured.outside.verifying_ms))
    heads = choice.max_heads if choice.mode == "coupled" else 1
    step, verify = measured.target.of(load, 1), measured.target.of(load, choice.num_rows)
    draft = measured.draft.of(max(load, heads), 1) + _at(measured.outside.drafting_ms, load)
    plain = step + between
    serial = one_round.tokens * plain / (choice.draft_tokens * draft + verify + verifying)
    hidden = one_round.tokens * plain / (max(choice.draft_tokens * draft, verify) + verifying)
    # Times are averaged, not speeds.
    share = one_round.whole if measured.is_parallel else 0.0
    return SpeedPrediction(
        serial=serial,
        hidden=hidden,
        expected=1 / (share / hidden + (1 - share) / serial),
        tokens_per_round=one_round.tokens,
        draft_ratio=draft / step,
        verify_ratio=verify / step,
        rounds=one_round,
    )


def _at(outside_ms: Mapping[int, float], load: int) -> float:
    """Time outside of steps at the nearest measured load."""
    if not outside_ms:
        return 0.0
    return outside_ms[min(outside_ms, key=lambda known: abs(known - load))]


def curve(measured: Measurements, choice: SettingsChoice, temperature: float, load: int) -> list[float]:
    """Expected speed-ups by draft length from 1 to the choice's, if every round has that length."""
    lengths = DRAFT_TOKENS[: choice.draft_tokens]
    return [
        predict(measured, dataclasses.replace(choice, draft_tokens=num), temperature, load).expected for num in lengths
    ]


def best_length(measured: Measurements, choice: SettingsChoice, temperature: float, load: int) -> SettingsChoice:
    """What a limit on the draft length comes to: in coupled mode the target verifies no more of it than pays.

    In coupled mode the target verifies only as many tokens as pay. In rejection mode every round has the limit's
    length, because only positions may decide.
    """
    if choice.mode == "rejection":
        return choice
    ratios = curve(measured, choice, temperature, load)
    return dataclasses.replace(choice, draft_tokens=1 + ratios.index(max(ratios)))


def expected_speedup(measured: Measurements, choice: SettingsChoice, temperature: float, load: int) -> float:
    """Expected speed-up with a choice as limit (`best_length`)."""
    return predict(measured, best_length(measured, choice, temperature, load), temperature, load).expected


def pick(measured: Measurements, loads: Sequence[int], modes: Sequence[str]) -> SettingsChoice:
    """The choice with the highest geometric mean of speed-ups over all temperatures and loads, and the shortest draft.

    Among nearly equal ones the shortest draft is chosen; rejection mode only if it gains a tenth, because coupled mode
    keeps the tokens of plain decoding.
    """
    found = {mode: _pick_in(measured, loads, mode) for mode in modes}
    usual, bar = found.get("coupled", found[modes[0]])
    others = [(ratio, choice) for choice, ratio in found.values() if ratio > _OTHER_MODE_GAIN * bar]
    return max(others, key=lambda pair: pair[0])[1] if others else usual


def _pick_in(measured: Measurements, loads: Sequence[int], mode: str) -> tuple[SettingsChoice, float]:
    ranked: list[tuple[float, SettingsChoice]] = []
    for longest in candidates(measured, mode):
        curves = [curve(measured, longest, temperature, load) for temperature in measured.outputs for load in loads]
        if mode == "coupled":
            curves = [list(itertools.accumulate(ratios, max)) for ratios in curves]
        means = [statistics.geometric_mean(ratios) for ratios in zip(*curves, strict=True)]
        ranked += [
            (mean, dataclasses.replace(longest, draft_tokens=num))
            for num, mean in zip(DRAFT_TOKENS, means, strict=True)
        ]
    best = max(mean for mean, _ in ranked)
    good = [
        (choice.draft_tokens, choice.num_siblings, mean, choice) for mean, choice in ranked if mean >= best * _ENOUGH
    ]
    _, _, mean, choice = min(good, key=lambda entry: entry[:2])
    return choice, mean


def candidates(measured: Measurements, mode: str) -> list[SettingsChoice]:
    """Every width worth a thought, at the longest draft.

    A second head pays if two rows cost the draft little more than one, and the draft does not take turns with the
    target.
    """
    second_row = measured.draft.of(2, 1) / measured.draft.of(1, 1)
    heads = 2 if measured.is_parallel and second_row < _CHEAP_ROW else 1
    return [
        SettingsChoice(draft_tokens=DRAFT_TOKENS[-1], num_siblings=num, max_heads=heads if num else 1, mode=mode)
        for num in (SIBLINGS if mode == "coupled" else (0,))
    ]
