"""What is aimed at on an H200, and what a slot has found beside it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Found = Mapping[str, Any]
"""Of a step."""
_TRANSFORMERS, _OURS = "transformers, assisted", "specdec, speculation"


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure that a step finds, or that follows from what it finds."""

    what: str
    step: str
    figure: Callable[[Found], float]
    """Raises LookupError or TypeError where the step has not found it."""
    bound: float
    is_least: bool = False
    """The bound is the least that is aimed at, and not the most."""

    def told(self, found: Found | None) -> str:
        """A line for people, with what a step has found; None: it has found nothing."""
        aim = f"{'at least' if self.is_least else 'at most'} {self.bound:g}"
        try:
            figure = self.figure(found or {})
        except (LookupError, TypeError):
            return f"{self.what}: not measured (aim: {aim}; step {self.step})"
        is_met = operator.ge if self.is_least else operator.le
        return f"{self.what}: {figure:.4g} (aim: {aim}): {'met' if is_met(figure, self.bound) else 'MISSED'}"


def _of(name: str) -> Callable[[Found], float]:
    return lambda found: float(found[name])


def _ratio(name: str, of: str) -> Callable[[Found], float]:
    return lambda found: float(found[name]) / float(found[of])


def _speedup(batch: int) -> Callable[[Found], float]:
    """The least median over temperatures."""

    def figure(found: Found) -> float:
        rows = [row for row in found["results"]["decode"] if row["batch"] == batch]
        return _least([row["speedup"]["median"] for row in rows])

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


def _least(figures: list[float]) -> float:
    if not figures:
        raise LookupError
    return min(figures)


_ONE, _TREE = "8b: 1 rows at 1024, graph ms", "8b: tree of 8 at {}, graph ms"
AIMS = (
    Aim("8B, 1 row at 1k, ms", "steps", _of(_ONE), 4.7),
    Aim("8B, tree of 8 rows at 1k, ms", "steps", _of(_TREE.format(1024)), 5.0),
    Aim("8B, tree of 64 rows over 1 row", "steps", _ratio("8b: tree of 64 at 1024, graph ms", _ONE), 1.3),
    Aim("8B, what 4k add to a tree of 8 rows, ms", "steps",
        lambda found: float(found[_TREE.format(4096)]) - float(found[_TREE.format(8)]), 0.35),
    Aim("1B, 1 row, ms", "steps", _of("1b: 1 rows at 1024, graph ms"), 0.95),
    Aim("1B, 8 drafted tokens, ms", "draft", _of("1 rows, graph ms"), 7.0),
    Aim("sampling, 8 rows of 128k, ms", "steps", _of("sampling of 8 rows ms"), 0.04),
    Aim("8B, prefill of 4k, ms", "steps", _of("8b: prefill of 4096, ms"), 250.0),
    Aim("gap between steps, 1 stream, p50, us", "gaps", _of("8b: gap at 1 streams, median us"), 150.0),
    Aim("gap between steps, 8 streams, p50, us", "gaps", _of("8b: gap at 8 streams, median us"), 150.0),
    Aim("8B served, speculation over plain, 1 stream", "loaded", _speedup(1), 3.0, is_least=True),
    Aim("32B served, speculation over plain, 1 stream", "inflated_32b", _speedup(1), 4.0, is_least=True),
    Aim("8B served, speculation over plain, 32 streams", "loaded", _speedup(32), 0.97, is_least=True),
    Aim("8B served, over transformers' assisted generation", "inflated", _over_assisted, 3.0, is_least=True),
    Aim("deterministic over fast, 8B, 8 rows, speed", "steps",
        _ratio("8b: 8 rows at 1024, graph ms", "8b deterministic: 8 rows at 1024, graph ms"), 0.75, is_least=True),
    Aim("deterministic, rows whose logits differ", "bitwise", _differing, 0.0),
    Aim("streams of 100 equal after a target was killed", "failover",
        _of("streams equal after a target was killed"), 100.0, is_least=True),
)  # fmt: skip


def beside_aims(state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each aim, with what the steps of a slot have found."""
    return [aim.told(state.get(aim.step, {}).get("found")) for aim in AIMS]
