"""Aims for an H200 as data, and their lines beside a slot's findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_SPEED, _GAIN = "tokens/s of {} at temperature {:g}", "speed-up of {} at temperature {:g}"


class Aim(NamedTuple):
    """A bound on a figure of a step, or on its ratio to another one."""

    step: str
    figure: str
    bound: float
    is_least: bool = False
    over: str = ""

    def told(self, entry: Mapping[str, Any]) -> str:
        """A line for people, from the step's entry or its last entry with findings."""
        tried = next((each for each in (entry, entry.get("earlier") or {}) if each.get("found")), {})
        found, gpu = tried.get("found") or {}, tried.get("gpu") or ""
        what = f"{self.step}: {self.figure}{f' over {self.over}' if self.over else ''}"
        aim = f"aim: at {'least' if self.is_least else 'most'} {self.bound:g}{'' if 'H200' in gpu else ' on an H200'}"
        if self.figure not in found or (self.over and not found.get(self.over)):
            return f"{what}: not measured ({aim})"
        figure = found[self.figure] / (found[self.over] if self.over else 1)
        is_met = figure >= self.bound if self.is_least else figure <= self.bound
        return f"{what}: {figure:.4g} ({aim}): {'met' if is_met else 'MISSED'}"


_OURS, _TRANSFORMERS = ([_SPEED.format(system, t) for t in (0, 1)]
                        for system in ("specdec, speculation", "transformers, assisted"))  # fmt: skip
_ORDERED = "8b deterministic: 8 rows at 1024, ms"
AIMS = (
    *(Aim("steps", f"8b: {rows} rows at 1024, ms", bound) for rows, bound in ((1, 6.4), (8, 7.0))),
    Aim("steps", "8b: 64 rows at 1024, ms", 1.3, over="8b: 1 rows at 1024, ms"),
    Aim("steps", "8b: 8 rows at 4096, ms", 1.06, over="8b: 8 rows at 8, ms"),
    Aim("steps", "8b: prompt of 4096, ms", 250.0),
    Aim("steps", _ORDERED, 1.33, over="8b: 8 rows at 1024, ms"),
    Aim("steps", "1b: 1 rows at 1024, ms", 0.95),
    Aim("exactness", "sampling of 8 rows, ms", 0.04),
    Aim("draft", "8 tokens, ms", 7.0),
    *(Aim("speedup", _GAIN.format(1, t), least, True) for t, least in ((0, 2.0), (1, 1.4))),
    *(Aim("large", _GAIN.format(1, t), least, True) for t, least in ((0, 2.6), (1, 1.8))),
    *(Aim("loaded", _GAIN.format(32, t), 0.97, True) for t in (0, 1)),
    *(Aim("assisted", ours, 3.0, True, over) for ours, over in zip(_OURS, _TRANSFORMERS, strict=True)),
    Aim("assisted", "systems with other tokens", 0.0),
    Aim("failover", "equal streams", 30.0, True),
)


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a report of ``bench`` by the names that aims have, and the report; else the findings as given."""
    found = {_GAIN.format(r["batch"], r["temperature"]): r["speedup"]["median"] for r in report.get("decode") or ()}
    cases = (report.get("systems") or {}).get("cases") or ()
    rows = [(case["temperature"], row) for case in cases for row in case["rows"]]
    found |= {_SPEED.format(row["system"], t): row["tokens_per_s"]["median"] for t, row in rows}
    if rows:
        found["systems with other tokens"] = sum(row["tokens"].startswith("VOID") for _, row in rows)
    return {**found, "report": report} if found else dict(report)
