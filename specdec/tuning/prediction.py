"""Speed-up of speculation from step times and agreement: serial, hidden, and what lies between.

A round commits E tokens. Serial, it takes the K steps of the draft and then the target's step over its rows; hidden, it
takes the longer of both, as the draft works on the next round meanwhile. The draft can do that only where it goes on
from what it has: after a verdict that it did not foresee, it begins anew. So a round is hidden as often as verdicts
are foreseen. Plain decoding takes the target's step over one row. What lies outside of steps is added to every step alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.tuning.measured import Agreement, Rounds, StepTimes, rounds

DRAFT_TOKENS = tuple(range(1, 17))
SIBLINGS = (0, 1, 2)
MODES = ("coupled", "rejection")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Of one pair on one machine."""

    target: StepTimes
    draft: StepTimes
    """One row of each sequence; a tree with two heads is two sequences."""
    outputs: Mapping[float, Sequence[Agreement]]
    """By temperature."""
    is_parallel: bool = True
    """Draft and target run at the same time: each has its own device, or cores."""
    outside_ms: Mapping[int, float] = field(default_factory=dict)
    """Of a step of plain decoding, by requests at once: what passes between steps of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What may be set."""

    draft_tokens: int
    num_siblings: int = 0
    max_heads: int = 1
    mode: str = "coupled"

    @property
    def num_rows(self) -> int:
        """Of the target's step, of each session."""
        return 1 + self.draft_tokens * (1 + self.num_siblings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Speed-ups over plain decoding, and what they are made of."""

    serial: float
    hidden: float
    expected: float
    tokens_per_round: float
    draft_ratio: float
    """c: a draft step over a plain target step."""
    verify_ratio: float
    """v: a target step over the round's rows, over one of one row."""
    rounds: Rounds


def predict(measured: Measurements, choice: Choice, temperature: float, load: int) -> Prediction:
    """Of a choice at a temperature with so many requests at once."""
    num_siblings = choice.num_siblings if choice.mode == "coupled" else 0
    one_round = rounds(measured.outputs[temperature], choice.mode, choice.draft_tokens, num_siblings)
    outside = _outside_ms(measured.outside_ms, load)
    heads = choice.max_heads if choice.mode == "coupled" else 1
    step, verify = measured.target.of(load, 1), measured.target.of(load, choice.num_rows)
    draft = measured.draft.of(max(load, heads), 1)
    plain = step + outside
    serial = one_round.tokens * plain / (choice.draft_tokens * draft + verify + outside)
    hidden = one_round.tokens * plain / (max(choice.draft_tokens * draft, verify) + outside)
    # Times add up, speeds do not.
    share = one_round.whole if measured.is_parallel else 0.0
    return Prediction(
        serial=serial,
        hidden=hidden,
        expected=1 / (share / hidden + (1 - share) / serial),
        tokens_per_round=one_round.tokens,
        draft_ratio=draft / step,
        verify_ratio=verify / step,
        rounds=one_round,
    )


def _outside_ms(outside_ms: Mapping[int, float], load: int) -> float:
    """Of the nearest load that was measured."""
    if not outside_ms:
        return 0.0
    return outside_ms[min(outside_ms, key=lambda known: abs(known - load))]


def candidates(measured: Measurements, modes: Iterable[str] = MODES, most: int = DRAFT_TOKENS[-1]) -> list[Choice]:
    """Every choice worth a thought. A second head pays where two rows cost the draft little more than one."""
    second_row = measured.draft.of(2, 1) / measured.draft.of(1, 1)
    heads = 2 if measured.is_parallel and second_row < 1.5 else 1
    found = []
    for mode in modes:
        for draft_tokens in DRAFT_TOKENS[:most]:
            for num_siblings in SIBLINGS if mode == "coupled" else (0,):
                own_heads = heads if num_siblings else 1
                found.append(
                    Choice(draft_tokens=draft_tokens, num_siblings=num_siblings, max_heads=own_heads, mode=mode)
                )
    return found


def mean_speedup(measured: Measurements, choice: Choice, loads: Sequence[int]) -> float:
    """Geometric mean over all temperatures and loads."""
    product, count = 1.0, 0
    for temperature in measured.outputs:
        for load in loads:
            product *= predict(measured, choice, temperature, load).expected
            count += 1
    return product ** (1 / count)
