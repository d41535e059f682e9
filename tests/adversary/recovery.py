"""Recovery times, by kind of fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.adversary.machine import Strain
from tests.adversary.verdict import Failure

PROTOCOLS = {"gRPC": "client-", "HTTP": "http-"}
"""How the names of each protocol's streams begin."""


@dataclass(slots=True, kw_only=True)
class EventRecord:
    """What became of one event. Times in seconds."""

    index: int
    label: str
    description: str
    leaves_nobody: bool
    """It cut off all targets or all coordinators."""
    stalls_s: list[float] = field(default_factory=list)
    """From the event's beginning on, of each stream, new ones included: the longest that a choice of it stood still."""
    worst_s: dict[str, float] = field(default_factory=dict)
    """The longest by protocol."""
    strain: Strain | None = None
    """Of the machine meanwhile."""
    whole_s: float | None = None
    """Until all services were healthy and used again; None: not in time."""
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By service: its process and how many it had open when all was whole again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    label: str
    num_events: int
    num_streams: int
    p50_s: float
    p99_s: float
    most_s: float
    whole_p50_s: float | None
    failures: str


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(records: Iterable[EventRecord], failures: Sequence[Failure]) -> list[Row]:
    """One row per kind of single fault, in alphabetical order, and one for all pairs."""
    groups: dict[str, list[EventRecord]] = {}
    for record in records:
        groups.setdefault("two at once" if " + " in record.label else record.label, []).append(record)
    return [_row(label, groups[label], failures) for label in sorted(groups)]


def _row(label: str, records: Sequence[EventRecord], failures: Sequence[Failure]) -> Row:
    stalls = [stall_s for record in records for stall_s in record.stalls_s] or [0.0]
    wholes = [record.whole_s for record in records if record.whole_s is not None]
    indexes = {record.index for record in records}
    counts: dict[str, int] = {}
    for failure in failures:
        if failure.event in indexes:
            counts[failure.what] = counts.get(failure.what, 0) + 1
    return Row(
        label=label,
        num_events=len(records),
        num_streams=sum(len(record.stalls_s) for record in records),
        p50_s=percentile(stalls, 0.5),
        p99_s=percentile(stalls, 0.99),
        most_s=max(stalls),
        whole_p50_s=percentile(wholes, 0.5) if wholes else None,
        failures=", ".join(f"{count} {what}" for what, count in sorted(counts.items())),
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table for people."""
    lines = [
        "| fault | events | streams | stall of a stream p50 | p99 | most | services whole again p50 | failures |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        whole = "never" if row.whole_p50_s is None else f"{row.whole_p50_s:.1f} s"
        cells = (
            row.label,
            row.num_events,
            row.num_streams,
            f"{row.p50_s:.2f} s",
            f"{row.p99_s:.2f} s",
            f"{row.most_s:.2f} s",
        )
        lines.append("| " + " | ".join([*map(str, cells), whole, row.failures or "none"]) + " |")
    return "\n".join(lines) + "\n"
