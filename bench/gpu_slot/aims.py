"""Aims for an H200 as data, and their lines beside a slot's findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

COPIES, _AIMED_AT, _AIMED_TB_PER_S = "copies, TB/s", "H200", 4.3
_OURS, _TRANSFORMERS = "specdec, speculation", "transformers, assisted"


class Aim(NamedTuple):
    """A bound on a figure of a step."""

    step: str
    figure: str
    bound: float
    is_least: bool = False
    of_memory: bool = False
    """Whether it is a time bound by memory: on other GPUs the bound grows with the time of a copy."""

    def told(self, entry: Mapping[str, Any]) -> str:
        """A line for people, from the step's entry or its last entry with findings."""
        tried = next((each for each in (entry, entry.get("earlier") or {}) if each.get("found")), {})
        gpu, found, bound = tried.get("gpu") or "", tried.get("found") or {}, self.bound
        where = "" if not gpu or _AIMED_AT in gpu else f", {gpu}"
        if self.of_memory and where and found.get(COPIES):
            bound *= _AIMED_TB_PER_S / found[COPIES]
        aim = f"{'at least' if self.is_least else 'at most'} {bound:.3g}{where}"
        if (figure := found.get(self.figure)) is None:
            return f"{self.step}: {self.figure}: not measured (aim: {aim})"
        is_met = figure >= bound if self.is_least else figure <= bound
        return f"{self.step}: {self.figure}: {figure:.4g} (aim: {aim}): {'met' if is_met else 'MISSED'}"


_GAIN = "speed-up of {} at temperature {}"
AIMS = (
    Aim("steps", "8b: 1 rows at 1024, ms", 6.4, of_memory=True),
    Aim("steps", "8b: 8 rows at 1024, ms", 7.0, of_memory=True),
    Aim("steps", "8b: 64 rows over 1 row", 1.3),
    Aim("steps", "8b: what 4k add to 8 rows, ms", 0.35, of_memory=True),
    Aim("steps", "8b: prompt of 4096, ms", 250.0),
    Aim("steps", "8b: deterministic over fast, speed", 0.75, is_least=True),
    Aim("steps", "1b: 1 rows at 1024, ms", 0.95, of_memory=True),
    Aim("steps", "sampling of 8 rows of 128k, ms", 0.04),
    Aim("draft", "8 tokens, ms", 7.0, of_memory=True),
    Aim("speedup", _GAIN.format(1, 0), 2.0, is_least=True),
    Aim("speedup", _GAIN.format(1, 1), 1.4, is_least=True),
    Aim("large", _GAIN.format(1, 0), 2.6, is_least=True),
    Aim("large", _GAIN.format(1, 1), 1.8, is_least=True),
    Aim("loaded", _GAIN.format(32, 0), 0.97, is_least=True),
    Aim("loaded", _GAIN.format(32, 1), 0.97, is_least=True),
    Aim("assisted", "over transformers' assisted at temperature 0", 3.0, is_least=True),
    Aim("assisted", "over transformers' assisted at temperature 1", 3.0, is_least=True),
    Aim("assisted", "systems with other tokens", 0.0),
    Aim("failover", "equal streams", 30.0, is_least=True),
)


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a report of ``bench`` by the names that aims have, and the report."""
    found: dict[str, Any] = {}
    for row in report.get("decode") or ():
        found[_GAIN.format(row["batch"], f"{row['temperature']:g}")] = row["speedup"]["median"]
    for case in (report.get("systems") or {}).get("cases") or ():
        speeds = {row["system"]: row["tokens_per_s"]["median"] for row in case["rows"]}
        if speeds.keys() >= {_OURS, _TRANSFORMERS}:
            ratio = speeds[_OURS] / speeds[_TRANSFORMERS]
            found[f"over transformers' assisted at temperature {case['temperature']:g}"] = ratio
        void = sum(row["tokens"].startswith("VOID") for row in case["rows"])
        found["systems with other tokens"] = found.get("systems with other tokens", 0) + void
    return {**found, "report": report} if found else dict(report)
