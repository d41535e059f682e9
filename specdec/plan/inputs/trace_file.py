"""Traces: files with a line of JSON for each request (`trace_lines.py`), their order and their holes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specdec.plan.inputs.devices import PlanImpossible
from specdec.plan.inputs.trace_lines import TIMES, LineRead, read_line
from specdec.plan.inputs.traffic import Arrival, Trace

_MOST_LINE_CHARS = 1 << 28
_MOST_REQUESTS = 5_000_000
_HOLE_S = 60.0
"""Seconds without a request that are a hole, if they are also `_HOLE_GAPS` mean gaps and `_HOLE_SHARE` of the trace."""
_HOLE_GAPS, _HOLE_SHARE = 100, 0.05


def read_trace(
    path: Path, rate: float | None, *, keep_gaps: bool = False, seed: int = 0, timestamp_s: float = 1e-3
) -> Trace:
    """Read a trace; lines without times arrive at random, `rate` per second, and others are scaled to it.

    `timestamp_s`: seconds of a unit of `timestamp`, where a line's time has that name and is a number.

    Raises PlanImpossible: names the line and the field, or the hole, and what would be possible.
    """
    found: list[tuple[int, Arrival]] = []
    is_in_order, num_left_out = True, 0
    for number, line in _lines(path, timestamp_s):
        found += [(number, arrival) for arrival in line.arrivals]
        is_in_order, num_left_out = is_in_order and line.is_in_order, num_left_out + line.num_left_out
        if len(found) > _MOST_REQUESTS:
            raise PlanImpossible(f"{path} has more than {_MOST_REQUESTS} requests: cut it")
    if not found:
        raise PlanImpossible(
            f"the trace {path} is empty: it needs a line of JSON for each request, or the log of a coordinator with "
            "--access-log"
        )
    timed = [not math.isnan(request.at_s) for _, request in found]
    if not any(timed):
        return Trace(_spread(path, [request for _, request in found], rate, seed))
    if not all(timed):
        line_number = found[timed.index(False)][0]
        raise PlanImpossible(
            f"{path}, line {line_number}: it has no time, and others do; one of {', '.join(TIMES)} is needed"
        )
    if not is_in_order:
        found.sort(key=lambda each: each[1].at_s)
    for (_, before), (number, after) in itertools.pairwise(found):
        if after.at_s < before.at_s:
            raise PlanImpossible(
                f"{path}, line {number}: its time {after.at_s:g} s is before the line above; sort the trace by time"
            )
    first_s = found[0][1].at_s
    numbers, requests = [number for number, _ in found], [replace(each, at_s=each.at_s - first_s) for _, each in found]
    if not requests[-1].at_s:
        raise PlanImpossible(
            f"{path} has no time between its first and last request, and so no rate: give a longer one, or one without "
            "times and --rate"
        )
    if not keep_gaps:
        _check_holes(path, requests, numbers)
    trace = Trace(requests, num_left_out=num_left_out)
    return trace if rate is None else trace.scaled(rate / trace.per_s)


def _lines(path: Path, timestamp_s: float) -> Iterator[tuple[int, LineRead]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number in itertools.count(1):
                line = file.readline(_MOST_LINE_CHARS)
                if not line:
                    return
                if len(line) == _MOST_LINE_CHARS:
                    raise PlanImpossible(f"{path}, line {number}: it has more than {_MOST_LINE_CHARS} characters")
                if line.strip():
                    yield number, read_line(f"{path}, line {number}", line, timestamp_s)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise PlanImpossible(f"the trace {path} cannot be read: {why}") from error


def _spread(path: Path, requests: Sequence[Arrival], rate: float | None, seed: int) -> list[Arrival]:
    if rate is None:
        raise PlanImpossible(f"{path} has no times: give --rate, or one of {', '.join(TIMES)} in each line")
    times_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(requests)))
    return [replace(request, at_s=float(at - times_s[0])) for request, at in zip(requests, times_s, strict=True)]


def _check_holes(path: Path, requests: Sequence[Arrival], numbers: Sequence[int]) -> None:
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(requests)]
    if not gaps:
        return
    longest = max(gaps)
    index, whole_s = gaps.index(longest), requests[-1].at_s - requests[0].at_s
    others = statistics.fmean([*gaps[:index], *gaps[index + 1 :]]) if len(gaps) > 1 else 0.0
    if longest >= max(_HOLE_S, _HOLE_GAPS * others, _HOLE_SHARE * whole_s):
        raise PlanImpossible(
            f"{path} has a hole: nothing arrives from {requests[index].at_s:.0f} s to {requests[index + 1].at_s:.0f} s "
            f"(lines {numbers[index]} to {numbers[index + 1]}); cut the trace there, or keep it with --keep-gaps"
        )
