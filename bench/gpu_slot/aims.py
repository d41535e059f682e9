"""Aims for an H200, and predictions for the GPU of a slot, beside the slot's findings."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Found = Mapping[str, Any]
"""Findings of a step."""
Entry = Mapping[str, Any]
"""Result of a step: its findings and its GPU."""
_TRANSFORMERS, _OURS = "transformers, assisted", "specdec, speculation"
_AIMED_AT, _COPIES, _AIMED_TB_PER_S = "H200", "copies, TB/s", 4.3
_CONFIRMED_WITHIN = 0.15
"""Share of a measured figure by which a confirmed prediction may differ."""


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure among a step's findings, or computed from them, and its bound."""

    what: str
    step: str
    figure: Callable[[Found], float]
    """The figure of a step's findings. Raises LookupError or TypeError where they lack it."""
    bound: float
    is_least: bool = False
    """Whether the bound is a minimum and not a maximum."""
    of_memory: bool = False
    """Whether the figure is a time bound by memory: on other GPUs the bound grows with the time of a copy."""

    def told(self, entry: Entry | None) -> str:
        """A line for people, with the result of the aim's step; None: the step has none."""
        entry = entry or {}
        for tried in (entry, entry.get("earlier") or {}):
            found = tried.get("found") or {}
            try:
                figure = self.figure(found)
            except (LookupError, TypeError):
                continue
            bound, where = self._bound_on(tried.get("gpu"), found)
            is_met = operator.ge if self.is_least else operator.le
            verdict = "met" if is_met(figure, bound) else "MISSED"
            return f"{self.what}: {figure:.4g} ({self._aim()}{where}): {verdict}"
        return f"{self.what}: not measured ({self._aim()}; step {self.step})"

    def _aim(self) -> str:
        return f"aim: {'at least' if self.is_least else 'at most'} {self.bound:g}"

    def _bound_on(self, gpu: str | None, found: Found) -> tuple[float, str]:
        """The bound on the slot's GPU, and the words that explain it."""
        if gpu is None or _AIMED_AT in gpu:
            return self.bound, ""
        copies = found.get(_COPIES)
        if not self.of_memory or not copies:
            return self.bound, f" on an {_AIMED_AT}; this is {gpu}"
        bound = self.bound * _AIMED_TB_PER_S / copies
        return bound, f" on an {_AIMED_AT}; {bound:.3g} on {gpu}, whose copies move {copies:.3g} TB/s"


def _of(name: str) -> Callable[[Found], float]:
    return lambda found: float(found[name])


def _ratio(name: str, of: str) -> Callable[[Found], float]:
    return lambda found: float(found[name]) / float(found[of])


def _speedup(batch: int, temperature: float) -> Callable[[Found], float]:
    def figure(found: Found) -> float:
        rows = [row for row in found["results"]["decode"] if row["batch"] == batch]
        return _least([row["speedup"]["median"] for row in rows if row["temperature"] == temperature])

    return figure


def _over_assisted(found: Found) -> float:
    speeds = [
        {row["system"]: row["tokens_per_s"]["median"] for row in case["rows"]}
        for case in found["results"]["systems"]["cases"]
    ]
    return _least([case[_OURS] / case[_TRANSFORMERS] for case in speeds])


def _differing(found: Found) -> float:
    rows = [differing for name, (differing, _) in found.items() if name.startswith("deterministic: rows in")]
    return float(sum(rows)) if rows else _least(rows)


def _void(found: Found) -> float:
    """Number of systems whose greedy tokens differ from plain decoding's by more than near-ties."""
    verdicts = [row["tokens"] for case in found["results"]["systems"]["cases"] for row in case["rows"]]
    return float(sum(verdict.startswith("VOID") for verdict in verdicts)) if verdicts else _least(verdicts)


def _least(figures: list[float]) -> float:
    if not figures:
        raise LookupError
    return min(figures)


_ONE, _TREE = "8b: 1 rows at 1024, graph ms", "8b: tree of 8 at {}, graph ms"
AIMS = (
    Aim("8B, 1 row at 1k, ms", "steps", _of(_ONE), 6.4, of_memory=True),
    Aim("8B, tree of 8 rows at 1k, ms", "steps", _of(_TREE.format(1024)), 7.0, of_memory=True),
    Aim("8B, tree of 64 rows over 1 row", "steps", _ratio("8b: tree of 64 at 1024, graph ms", _ONE), 1.3),
    Aim("8B, what 4k add to a tree of 8 rows, ms", "steps",
        lambda found: float(found[_TREE.format(4096)]) - float(found[_TREE.format(8)]), 0.35, of_memory=True),
    Aim("1B, 1 row, ms", "steps", _of("1b: 1 rows at 1024, graph ms"), 0.95, of_memory=True),
    Aim("1B, 8 drafted tokens, ms", "draft", _of("1 rows, graph ms"), 7.0, of_memory=True),
    Aim("sampling, 8 rows of 128k, ms", "steps", _of("sampling of 8 rows ms"), 0.04),
    Aim("8B, prefill of 4k, ms", "steps", _of("8b: prefill of 4096, ms"), 250.0),
    Aim("1B/8B served, speculation over plain, temperature 0", "speedup", _speedup(1, 0.0), 2.0, is_least=True),
    Aim("1B/8B served, speculation over plain, temperature 1", "speedup", _speedup(1, 1.0), 1.4, is_least=True),
    Aim("0.5B/32B served, speculation over plain, temperature 0", "large", _speedup(1, 0.0), 2.6, is_least=True),
    Aim("0.5B/32B served, speculation over plain, temperature 1", "large", _speedup(1, 1.0), 1.8, is_least=True),
    Aim("1B/8B at 32 streams, speculation over plain, temperature 0", "loaded", _speedup(32, 0.0), 0.97,
        is_least=True),
    Aim("1B/8B at 32 streams, speculation over plain, temperature 1", "loaded", _speedup(32, 1.0), 0.97,
        is_least=True),
    Aim("8B served, over transformers' assisted generation", "assisted", _over_assisted, 3.0, is_least=True),
    Aim("8B served, ours and transformers' that say other tokens than plain decoding", "assisted", _void, 0.0),
    Aim("shipped target, greedy tokens that differ from transformers' of a thousand", "greedy",
        lambda found: 1000.0 * found["tokens that differ"] / found["tokens"], 2.0),
    Aim("deterministic over fast, 8B, 8 rows, speed", "steps",
        _ratio("8b: 8 rows at 1024, graph ms", "8b deterministic: 8 rows at 1024, graph ms"), 0.75, is_least=True),
    Aim("deterministic, rows whose logits differ", "bitwise", _differing, 0.0),
    Aim("streams of 30 equal after a target was killed", "failover",
        _of("streams equal after a target was killed"), 30.0, is_least=True),
)  # fmt: skip


def beside_aims(state: Mapping[str, Entry]) -> list[str]:
    """A line for each aim, with the findings of a slot."""
    return [aim.told(state.get(aim.step)) for aim in AIMS]


def beside_predictions(state: Mapping[str, Entry]) -> list[str]:
    """A line for each prediction of ``bench.roofline`` whose figure was measured."""
    lines = []
    found = _found_of(state, "steps")
    for name, predicted in (found.get("predicted") or {}).items():
        if name in found:
            lines.append(_compared(name, float(found[name]), float(predicted)))
    for step in ("speedup", "large"):
        found = _found_of(state, step)
        for row in ((found.get("results") or {}).get("decode") or []) if found.get("predicted") else []:
            predicted = found["predicted"].get(f"{row['temperature']:g}")
            if row["batch"] == 1 and predicted:
                what = f"{step}: speed-up at temperature {row['temperature']:g}, {predicted['accepted']:.0%} accepted"
                lines.append(_compared(what, float(row["speedup"]["median"]), float(predicted["speed-up"])))
    return lines


def _found_of(state: Mapping[str, Entry], step: str) -> Found:
    entry = state.get(step) or {}
    return entry.get("found") or (entry.get("earlier") or {}).get("found") or {}


def _compared(what: str, measured: float, predicted: float) -> str:
    is_close = abs(predicted - measured) <= _CONFIRMED_WITHIN * measured
    return f"{what}: {measured:.4g} (predicted: {predicted:.4g}): {'confirmed' if is_close else 'REFUTED'}"
