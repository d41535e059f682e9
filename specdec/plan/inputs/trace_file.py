"""Traces as JSONL: Mooncake's, `vllm bench serve`'s datasets, and lists of times and lengths."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specdec.plan.inputs.devices import PlanImpossible
from specdec.plan.inputs.traffic import Arrival, Trace

_TIMES = (("timestamp", 1e-3), ("timestamp_ms", 1e-3), ("arrived_s", 1.0), ("time_s", 1.0), ("arrival_time", 1.0))
"""Names of a request's time, with seconds per unit; Mooncake's `timestamp` is in milliseconds."""
_PROMPTS = ("input_length", "prompt_len", "prompt_tokens", "num_prompt_tokens", "input_tokens")
_OUTPUTS = ("output_length", "output_len", "output_tokens", "num_output_tokens", "expected_output_len", "max_tokens")
_BYTES_PER_TOKEN = 4
"""Bytes of a text per token, where a line has the text and no number."""
_MOST_TOKENS = 1_000_000
_MOST_ID = 1 << 126
_HOLE_S = 60.0
"""Seconds without a request that are a hole, if they are also `_HOLE_GAPS` mean gaps and `_HOLE_SHARE` of the trace."""
_HOLE_GAPS, _HOLE_SHARE = 100, 0.05


def read_trace(path: Path, rate: float | None, *, keep_gaps: bool = False, seed: int = 0) -> Trace:
    """Read a trace; lines without times arrive at random, `rate` per second.

    Raises PlanImpossible: names the line and the field, or the hole, and what would be possible.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise PlanImpossible(f"the trace {path} cannot be read: {why}") from error
    found = [(number, _arrival(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise PlanImpossible(f"the trace {path} is empty: it needs a line of JSON for each request")
    numbers, requests = [number for number, _ in found], [request for _, request in found]
    timed = [not math.isnan(request.at_s) for request in requests]
    if not any(timed):
        return Trace(_spread(path, requests, rate, seed))
    if not all(timed):
        line = numbers[timed.index(False)]
        raise PlanImpossible(f"{path}, line {line}: it has no time, and others do; one of {_names(_TIMES)} is needed")
    for before, after, number in zip(requests, requests[1:], numbers[1:], strict=False):
        if after.at_s < before.at_s:
            raise PlanImpossible(
                f"{path}, line {number}: its time {after.at_s:g} s is before the line above; sort the trace by time"
            )
    if not keep_gaps:
        _check_holes(path, requests, numbers)
    first_s = requests[0].at_s
    return Trace([replace(request, at_s=request.at_s - first_s) for request in requests])


def _arrival(path: Path, number: int, line: str) -> Arrival:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, Mapping):
        raise PlanImpossible(f"{path}, line {number}: it is no JSON object; a trace has one in each line")
    where = f"{path}, line {number}"
    unit = next(((name, unit) for name, unit in _TIMES if fields.get(name) is not None), None)
    at_s = math.nan if unit is None else _number(where, unit[0], fields[unit[0]], 0) * unit[1]
    prompt = _length(where, fields, _PROMPTS)
    if prompt is None and isinstance(text := fields.get("prompt"), str):
        prompt = max(1, len(text.encode()) // _BYTES_PER_TOKEN)
    output = _length(where, fields, _OUTPUTS)
    for value, names in ((prompt, (*_PROMPTS, "prompt")), (output, _OUTPUTS)):
        if value is None:
            raise PlanImpossible(f"{where}: it has no length; one of {', '.join(names)} is needed")
    hashes = fields.get("hash_ids", ())
    prefix = (
        tuple(each for each in hashes if isinstance(each, int) and abs(each) < _MOST_ID)
        if isinstance(hashes, Sequence)
        else ()
    )
    tenant = fields.get("tenant", "")
    return Arrival(at_s, prompt or 1, output or 1, tenant if isinstance(tenant, str) else "", prefix)


def _length(where: str, fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    name = next((each for each in names if fields.get(each) is not None), None)
    return None if name is None else int(_number(where, name, fields[name], 1))


def _number(where: str, name: str, value: object, least: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= float(str(value)) or (least and float(str(value)) > _MOST_TOKENS):
        most = f" to {_MOST_TOKENS}" if least else ""
        raise PlanImpossible(f"{where}: {name} is {str(value)[:30]!r}, no number from {least:g}{most}")
    return float(str(value))


def _spread(path: Path, requests: Sequence[Arrival], rate: float | None, seed: int) -> list[Arrival]:
    if rate is None:
        raise PlanImpossible(f"{path} has no times: give --rate, or one of {_names(_TIMES)} in each line")
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


def _names(pairs: Sequence[tuple[str, float]]) -> str:
    return ", ".join(name for name, _ in pairs)
