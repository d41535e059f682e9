"""What is kept of a run: raw results as JSON, and the same for people as Markdown."""

from __future__ import annotations

import datetime
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.report import versions
from specdec.commands.measuring.report import machine
from tests.adversary.chaos import ChaosResult
from tests.adversary.hosts.hosts import memory_text
from tests.adversary.machine import Strain
from tests.adversary.recovery import PROTOCOLS, markdown, percentile, table

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def save(name: str, results: dict[str, Any], text: str, folder: Path = RESULTS) -> Path:
    """Write both files; returns the one for people."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M")
    measured = {"machine": machine(sorted(os.sched_getaffinity(0))), "versions": versions(), **results}
    (folder / f"{stamp}-{name}.json").write_text(compact_json(measured), encoding="utf-8")
    path = folder / f"{stamp}-{name}.md"
    heading = f"# {name}, {stamp}\n\n{_describe(measured)}\n\n"
    path.write_text(heading + text, encoding="utf-8")
    return path


def compact_json(value: dict[str, Any]) -> str:
    """JSON with a line for each key and for each row of a list: an hour of samples is 360 lines, not 20,000."""
    fields = []
    for key, item in value.items():
        text = json.dumps(_rounded(item))
        if isinstance(item, list) and item and isinstance(item[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(_rounded(row)) for row in item) + "\n ]"
        fields.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any clock here has; what is not finite has no JSON."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _describe(measured: dict[str, Any]) -> str:
    where, what = measured["machine"], measured["versions"]
    load = ", ".join(f"{value:.1f}" for value in where["load_average"])
    cpu = where["cpu"] if isinstance(where["cpu"], str) else f"{where['cpu'].get('maker')} {where['cpu'].get('model')}"
    return (
        f"Revision {what['specdec']}, Python {what['python']}, on {where['cores_used']} cores of {cpu}"
        f" ({where['system']}); load average at the end {load}."
    )


def chaos_text(result: ChaosResult, command: str) -> str:
    """A run of chaos for people."""
    verdict = result.verdict
    lines = [
        f"`{command}`: {len(result.records)} events in {result.wall_s:.0f} s; {verdict.num_equal} answers and"
        f" {verdict.num_cut_off} that were cut off were equal to their undisturbed runs;"
        f" {len(verdict.failures)} failures. Path {result.path}: answers of drafts in the undisturbed run were"
        f" {result.ways.get('direct', 0)} direct and {result.ways.get('relayed', 0)} relayed.",
        "",
        standstills_text(result),
        "",
        "A stall is the longest time that a choice of a stream got no token, from the fault's beginning until all",
        "services were whole again; requests that were sent meanwhile count, too. p50 and p99 are over all streams.",
        "",
        markdown(table(result.records, verdict.failures)),
        f"Refused before the first chunk, and asked again: {dict(verdict.refusals) or 'none'}.",
        "",
    ]
    if verdict.failures:
        lines += ["## Failures", ""]
        lines += [f"- {f.what} at {f.at_s:.0f} s, event {f.event} ({f.label}): {f.detail}" for f in verdict.failures]
        lines.append("")
    if result.memory:
        lines += ["## Memory", "", memory_text(result.memory), ""]
    lines += ["## Descriptors", "", descriptors_text(result), ""]
    return "\n".join(lines)


def standstills_text(result: ChaosResult) -> str:
    """The worst standstill of each protocol, and what the machine had to do with it."""
    records = result.records
    worst = {protocol: max((r.worst_s.get(protocol, 0.0) for r in records), default=0.0) for protocol in PROTOCOLS}
    told = ", ".join(f"{seconds:.2f} s over {protocol}" for protocol, seconds in worst.items())
    strains = [record.strain for record in records if record.strain is not None] or [Strain(0.0, 0.0)]
    waited = percentile([one.waited for one in strains], 0.5)
    return (
        f"Worst standstill: {told}. {result.verdict.num_over_http} answers came over HTTP;"
        f" {result.verdict.num_asked_again} requests were asked again, because their gateway ended. In the median event"
        f" some process waited for a processor for {waited:.0%} of the time; the clients' own event loop was late by at"
        f" most {max(one.lag_s for one in strains):.2f} s."
    )


def descriptors_text(result: ChaosResult) -> str:
    """How many files each process that lived for at least four events had open, at first and at last."""
    seen: dict[tuple[str, int], list[int]] = {}
    for record in result.records:
        for name, (pid, count) in record.descriptors.items():
            seen.setdefault((name, pid), []).append(count)
    rows = [
        f"| {name} | {len(counts)} | {counts[0]} | {max(counts)} | {counts[-1]} |"
        for (name, _), counts in sorted(seen.items())
        if len(counts) >= 4
    ]
    return "\n".join(["| process | events | first | most | last |", "|---|---|---|---|---|", *rows])


def chaos_json(result: ChaosResult) -> dict[str, Any]:
    """A run of chaos for programs."""
    verdict = result.verdict
    return {
        "wall_s": result.wall_s,
        "path": result.path,
        "ways": result.ways,
        "num_equal": verdict.num_equal,
        "num_cut_off": verdict.num_cut_off,
        "num_over_http": verdict.num_over_http,
        "num_asked_again": verdict.num_asked_again,
        "memory": result.memory,
        "refusals": dict(verdict.refusals),
        "failures": [asdict(failure) for failure in verdict.failures],
        "events": [asdict(record) for record in result.records],
        "recovery": [asdict(row) for row in table(result.records, verdict.failures)],
    }
