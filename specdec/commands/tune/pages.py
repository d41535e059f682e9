"""Tables and plots of measurements, predictions and advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.commands.measuring.svg import PlotPoint as Mark
from specdec.commands.measuring.svg import lines
from specdec.commands.measuring.tables import Table
from specdec.commands.tune.advice import Advice
from specdec.commands.tune.measured import agreement_share, rounds
from specdec.commands.tune.prediction import (
    DRAFT_TOKENS,
    MODES,
    Measurements,
    SettingsChoice,
    best_length,
    curve,
    predict,
)

_ROWS = (1, 2, 4, 8, 16)


def curves(measured: Measurements, choice: SettingsChoice, loads: Sequence[int]) -> dict[float, dict[int, list[float]]]:
    """Predicted speed-ups by temperature, load and fixed draft length from 1; other settings as chosen."""
    longest = dataclasses.replace(choice, draft_tokens=DRAFT_TOKENS[-1])
    return {
        temperature: {load: curve(measured, longest, temperature, load) for load in loads}
        for temperature in measured.outputs
    }


def tables_of(measured: Measurements, advice: Advice) -> list[Table]:
    """Tables of step times, acceptance, speed-up by draft length, and predictions beside measurements."""
    steps = Table("Steps, ms", ("sequences", *(f"target, {num} rows each" for num in _ROWS), "draft"))
    for count in measured.target.sequences:
        steps.add(count, *(measured.target.of(count, num) for num in _ROWS), measured.draft.of(count, 1))
    accepted = Table(
        "Acceptance on these prompts", ("temperature", "mode", "of all tokens", "still right at depth 1, 2, ...")
    )
    for temperature, outputs in measured.outputs.items():
        for mode in MODES:
            survival = rounds(outputs, mode, 8).survival
            text = " ".join(f"{share:.2f}" for share in survival)
            accepted.add(f"{temperature:g}", mode, f"{agreement_share(outputs, mode):.0%}", text)
    loads = sorted({point.load for point in advice.points})
    by_length = Table("Predicted speed-up by draft length", ("temperature", "at once", *map(str, DRAFT_TOKENS)))
    for temperature, by_load in curves(measured, advice.choice, loads).items():
        for load, ratios in by_load.items():
            by_length.add(f"{temperature:g}", load, *(f"{ratio:.2f}" for ratio in ratios))
    checked = Table(
        "The pick against plain decoding", ("temperature", "at once", "predicted", "measured", "K", "c", "v", "E")
    )
    for point in advice.points:
        used = best_length(measured, advice.choice, point.temperature, point.load)
        made = predict(measured, used, point.temperature, point.load)
        parts = (used.draft_tokens, made.draft_ratio, made.verify_ratio, made.tokens_per_round)
        checked.add(f"{point.temperature:g}", point.load, point.predicted, point.measured, *parts)
    checked.notes.append(
        "K: most draft tokens of a round that pay. c: time of a draft step relative to a target step of one row. v: "
        "time of a target step over the round's rows, relative to one row. E: tokens per round. Measured: medians of "
        "alternating runs, by time per token."
    )
    return [steps, accepted, by_length, checked]


def plots_of(measured: Measurements, advice: Advice, note: str) -> dict[str, str]:
    """Speed-up by draft length and by load, acceptance by depth, as SVG by name."""
    loads = sorted({point.load for point in advice.points})
    found = {}
    for temperature, by_load in curves(measured, advice.choice, loads).items():
        series = {
            f"{load} at once": [Mark(num, ratio, ratio, ratio) for num, ratio in zip(DRAFT_TOKENS, ratios, strict=True)]
            for load, ratios in by_load.items()
        }
        title = f"Predicted speed-up by draft length, temperature {temperature:g}"
        found[f"draft-length-{temperature:g}"] = lines(title, note, "draft tokens", "times plain", series)
    by_kind: dict[str, list[Mark]] = {}
    for point in advice.points:
        for kind, ratio in (("predicted", point.predicted), ("measured", point.measured)):
            if ratio is not None:
                name = f"{kind}, temperature {point.temperature:g}"
                by_kind.setdefault(name, []).append(Mark(point.load, ratio, ratio, ratio))
    found["load"] = lines("Speed-up by load", note, "requests at once", "times plain", by_kind, log_x=True)
    depths = {
        f"{mode}, temperature {temperature:g}": [
            Mark(depth, share, share, share) for depth, share in enumerate(rounds(outputs, mode, 16).survival, 1)
        ]
        for temperature, outputs in measured.outputs.items()
        for mode in MODES
    }
    found["acceptance"] = lines("Still right by depth", note, "depth of the draft token", "share of rounds", depths)
    return found


def results(measured: Measurements, advice: Advice) -> dict[str, Any]:
    """All results, for JSON."""
    loads = sorted({point.load for point in advice.points})
    choice = advice.choice
    picked = {name: getattr(choice, name) for name in ("draft_tokens", "num_siblings", "max_heads", "mode")}
    return {
        "speculate": advice.speculate,
        "choice": picked,
        "reasons": list(advice.reasons),
        "points": [
            {name: getattr(point, name) for name in ("temperature", "load", "predicted", "measured")}
            for point in advice.points
        ],
        "curves": curves(measured, choice, loads),
        "target_step_ms": measured.target.ms,
        "draft_step_ms": measured.draft.ms,
        "target_prompt_ms": dict(measured.target_prompt_ms),
        "draft_prompt_ms": dict(measured.draft_prompt_ms),
        "outside_ms": dict(measured.outside.plain_ms),
        "outside_verifying_ms": dict(measured.outside.verifying_ms),
        "outside_drafting_ms": dict(measured.outside.drafting_ms),
        "survival": _survival(measured.outputs),
    }


def _survival(outputs: Mapping[float, Sequence[Any]]) -> dict[float, dict[str, Sequence[float]]]:
    return {
        temperature: {mode: rounds(own, mode, DRAFT_TOKENS[-1]).survival for mode in MODES}
        for temperature, own in outputs.items()
    }
