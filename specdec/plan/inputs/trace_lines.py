"""One line of a trace, in the forms that are known: what Mooncake, `vllm bench serve` and our coordinators write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from specdec.plan.inputs.devices import PlanImpossible
from specdec.plan.inputs.traffic import Arrival

TIMES = ("timestamp", "timestamp_ms", "arrived_s", "time_s", "arrival_time")
"""Names of a request's time. `timestamp` is in milliseconds, as in Mooncake's traces, unless the reader is told."""
_UNITS = {"timestamp_ms": 1e-3, "arrived_s": 1.0, "time_s": 1.0, "arrival_time": 1.0}
_PROMPTS = ("input_length", "prompt_len", "prompt_tokens", "num_prompt_tokens", "input_tokens")
_OUTPUTS = ("output_length", "output_len", "output_tokens", "num_output_tokens", "expected_output_len", "max_tokens")
_BYTES_PER_TOKEN = 4
"""Bytes of a text per token, where a line has the text and no number."""
_MOST_TOKENS = 1_000_000
_MOST_S = 1e17
"""Highest time in any unit: microseconds since 1970 are below."""
_MOST_ID = 1 << 126
_MOST_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class LineRead:
    """What a line of a trace has."""

    arrivals: Sequence[Arrival]
    """Times are NaN where the line has none."""
    is_in_order: bool = True
    """Whether the form has its lines in the order of arrival; others are sorted."""
    num_left_out: int = 0
    """Requests without lengths: they were refused or failed."""


def read_line(where: str, line: str, timestamp_s: float) -> LineRead:
    """Read a line; `timestamp_s`: seconds of a unit of `timestamp`. Raises PlanImpossible, which names the field."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, Mapping):
        raise PlanImpossible(f"{where}: it is no JSON object; a trace has one in each line")
    if "event" in fields and "service" in fields:
        return _logged(where, fields)
    if isinstance(fields.get("input_lens"), list):
        return _benchmarked(where, fields)
    if "request_throughput" in fields:
        raise PlanImpossible(
            f"{where}: this result of vllm bench serve has no requests: run it with --save-detailed, or give its "
            "dataset"
        )
    return LineRead([_request(where, fields, timestamp_s)])


def _request(where: str, fields: Mapping[str, Any], timestamp_s: float) -> Arrival:
    name = next((each for each in TIMES if fields.get(each) is not None), None)
    at_s = math.nan
    if name is not None:
        at_s = _number(where, name, fields[name], 0, _MOST_S) * _UNITS.get(name, timestamp_s)
    prompt = _length(where, fields, _PROMPTS)
    if prompt is None and isinstance(text := fields.get("prompt"), str):
        prompt = max(1, len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)
    output = _length(where, fields, _OUTPUTS)
    for value, names in ((prompt, (*_PROMPTS, "prompt")), (output, _OUTPUTS)):
        if value is None:
            raise PlanImpossible(f"{where}: it has no length; one of {', '.join(names)} is needed")
    hashes = fields.get("hash_ids", ())
    if not isinstance(hashes, list | tuple) or len(hashes) > _MOST_BLOCKS:
        raise PlanImpossible(f"{where}: hash_ids must be a list of at most {_MOST_BLOCKS} whole numbers")
    prefix = tuple(each for each in hashes if isinstance(each, int) and abs(each) < _MOST_ID)
    if len(prefix) != len(hashes):
        raise PlanImpossible(f"{where}: hash_ids must be whole numbers below 2**126")
    tenant = fields.get("tenant", "")
    return Arrival(at_s, prompt or 1, output or 1, tenant if isinstance(tenant, str) else "", prefix)


def _logged(where: str, fields: Mapping[str, Any]) -> LineRead:
    """A line of a coordinator's log: requests are those of `access_log`, in the order of their ends."""
    if fields["event"] not in ("request_ended", "request_failed") or fields["service"] != "coordinator":
        return LineRead([], is_in_order=False)
    prompt, output = (fields.get(name) for name in ("prompt_tokens", "output_tokens"))
    if not prompt or not output:
        return LineRead([], is_in_order=False, num_left_out=1)
    try:
        ended_s = datetime.fromisoformat(str(fields.get("timestamp"))).timestamp()
    except (ValueError, OverflowError) as error:
        raise PlanImpossible(f"{where}: timestamp is {str(fields.get('timestamp'))[:40]!r}, no time") from error
    at_s = ended_s - _number(where, "duration_s", fields.get("duration_s"), 0, _MOST_S)
    num_prompt = int(_number(where, "prompt_tokens", prompt, 1, _MOST_TOKENS))
    num_output = int(_number(where, "output_tokens", output, 1, _MOST_TOKENS))
    tenant = fields.get("tenant", "")
    arrival = Arrival(at_s, num_prompt, num_output, tenant if isinstance(tenant, str) else "")
    return LineRead([arrival], is_in_order=False)


def _benchmarked(where: str, fields: Mapping[str, Any]) -> LineRead:
    """A result of `vllm bench serve --save-result --save-detailed`: lists with an item for each request."""
    names = ("start_times", "input_lens", "output_lens")
    lists = [fields.get(name) for name in names]
    if not all(isinstance(each, list) and len(each) == len(fields["input_lens"]) for each in lists):
        raise PlanImpossible(f"{where}: {', '.join(names)} must be lists of one length, as --save-detailed writes them")
    requests = [(at, prompt, output) for at, prompt, output in zip(*lists, strict=True) if output]
    arrivals = [
        Arrival(
            _number(where, "start_times", at, 0, _MOST_S),
            int(_number(where, "input_lens", prompt, 1, _MOST_TOKENS)),
            int(_number(where, "output_lens", output, 1, _MOST_TOKENS)),
        )
        for at, prompt, output in requests
    ]
    return LineRead(arrivals, is_in_order=False, num_left_out=len(fields["input_lens"]) - len(arrivals))


def _length(where: str, fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    name = next((each for each in names if fields.get(each) is not None), None)
    return None if name is None else int(_number(where, name, fields[name], 1, _MOST_TOKENS))


def _number(where: str, name: str, value: object, least: float, most: float) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not least <= number <= most:
        raise PlanImpossible(f"{where}: {name} is {str(value)[:30]!r}, no number from {least:g} to {most:g}")
    return number
