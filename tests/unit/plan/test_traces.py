"""Traces in all forms that are read; a bad line is refused by its number, field and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.plan.inputs.devices import PlanImpossible
from specdec.plan.inputs.trace_file import read_trace
from tests.support.for_each import for_each


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(PlanImpossible) as caught:
        call()
    message = str(caught.value)
    assert message and "\n" not in message
    return message


MOONCAKE = [
    {"timestamp": 1000 * second, "input_length": 600, "output_length": 50, "hash_ids": [1, second + 2]}
    for second in range(30)
]


def trace_of(tmp_path: Path, lines: list[Any]) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_a_trace_of_mooncakes_has_its_times_lengths_and_prefixes(tmp_path: Path) -> None:
    trace = read_trace(trace_of(tmp_path, MOONCAKE), None)
    assert trace.per_s == pytest.approx(1.0)
    assert trace.mean_tokens == (600, 50)
    assert [r.prefix for r in trace.requests[:2]] == [(1, 2), (1, 3)]
    assert [a.at_s for a in trace.arrivals(3.5, 0)] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert len(trace.arrivals(60.0, 0)) == 60, "a short trace begins again"
    assert len(trace.scaled(2.0).arrivals(30.0, 0)) == pytest.approx(60, abs=1)
    assert trace.arrivals(30.0, 1) != trace.arrivals(30.0, 0)


def test_a_long_trace_is_judged_by_its_busiest_quarter_of_an_hour(tmp_path: Path) -> None:
    """Trials look at minutes: of a day with one busy hour most would see none of it."""
    quiet = [{"timestamp": 20_000 * each, "input_length": 600, "output_length": 50} for each in range(4320)]
    busy = [{"timestamp": 36_000_000 + 500 * each, "input_length": 600, "output_length": 50} for each in range(7200)]
    trace = read_trace(trace_of(tmp_path, sorted(quiet + busy, key=lambda each: each["timestamp"])), None)
    assert trace.per_s == pytest.approx(0.133, rel=0.01)
    assert trace.peak.per_s == pytest.approx(2.05, rel=0.01)
    assert trace.scaled(2.0).peak.per_s == pytest.approx(4.1, rel=0.01)
    assert trace.peak.requests[0].at_s == 0.0
    lonely = read_trace(trace_of(tmp_path, quiet[::180]), None, keep_gaps=True)
    assert lonely.peak.per_s == pytest.approx(1 / 900), "one request in an hour"


def test_a_dataset_without_times_arrives_at_a_rate(tmp_path: Path) -> None:
    file = trace_of(tmp_path, [{"prompt": "tell me " * 40, "output_tokens": 64} for _ in range(400)])
    trace = read_trace(file, 10.0)
    assert trace.per_s == pytest.approx(10.0, rel=0.2)
    assert trace.mean_tokens == (80, 64)
    assert "--rate" in refusal(lambda: read_trace(file, None))


@for_each(
    "line, wanted",
    (
        ("{", "line 31: it is no JSON object"),
        ("[]", "line 31: it is no JSON object"),
        ({"timestamp": 31_000, "output_length": 5}, "input_length"),
        ({"timestamp": 31_000, "input_length": 5}, "output_length"),
        ({"timestamp": 31_000, "input_length": 0, "output_length": 5}, "input_length is '0'"),
        ({"timestamp": 31_000, "input_length": True, "output_length": 5}, "input_length is 'True'"),
        ({"timestamp": 31_000, "input_length": 5, "output_length": 10**9}, "output_length"),
        ({"timestamp": "noon", "input_length": 5, "output_length": 5}, "timestamp is 'noon'"),
        ({"timestamp": 5, "input_length": 5, "output_length": 5}, "sort the trace"),
        ({"input_length": 5, "output_length": 5}, "it has no time"),
        ({"timestamp": 1e300, "input_length": 5, "output_length": 5}, "timestamp is '1e+300'"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "timestamp is 'nan'"),
        ({"timestamp": -1, "input_length": 5, "output_length": 5}, "timestamp is '-1'"),
        ({"timestamp": 31_000, "input_length": 5, "output_length": 5, "hash_ids": [2**126]}, "hash_ids"),
        ({"timestamp": 31_000, "input_length": 5, "output_length": 5, "hash_ids": "none"}, "hash_ids"),
        ("[" * 100_000, "line 31: it is no JSON object"),
        ({"request_throughput": 4.0, "total_input_tokens": 100}, "--save-detailed"),
        ({"input_lens": [5], "output_lens": [5, 6], "start_times": [1.0]}, "lists of one length"),
        ({"input_lens": [5], "output_lens": [5], "start_times": ["now"]}, "start_times is 'now'"),
        ({"timestamp": 4_000_000, "input_length": 5, "output_length": 5}, "--keep-gaps"),
    ),
)
def test_a_bad_line_and_a_hole_are_refused_by_line_and_remedy(
    line: Any, wanted: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = trace_of(tmp_path_factory.mktemp("trace"), [*MOONCAKE, line])
    assert wanted in refusal(lambda: read_trace(file, None))


def test_a_hole_may_be_kept_and_an_empty_or_missing_trace_not(tmp_path: Path) -> None:
    late = {"timestamp": 4_000_000, "input_length": 5, "output_length": 5}
    assert len(read_trace(trace_of(tmp_path, [*MOONCAKE, late]), None, keep_gaps=True).requests) == 31
    assert "empty" in refusal(lambda: read_trace(trace_of(tmp_path, [""]), None))
    assert "cannot be read" in refusal(lambda: read_trace(tmp_path / "none", None))


def test_a_trace_at_one_moment_has_no_rate(tmp_path: Path) -> None:
    line = {"timestamp": 7, "input_length": 5, "output_length": 5}
    for lines in ([line], [line] * 40):
        assert "--rate" in refusal(lambda lines=lines: read_trace(trace_of(tmp_path, lines), None))


def test_a_trace_with_times_is_scaled_to_a_rate_that_is_given(tmp_path: Path) -> None:
    file = trace_of(tmp_path, MOONCAKE)
    assert read_trace(file, 5.0).per_s == pytest.approx(5.0)
    assert len(read_trace(file, 5.0).arrivals(20.0, 0)) == pytest.approx(100, abs=2)
    assert read_trace(file, None, timestamp_s=1.0).per_s == pytest.approx(1e-3)


def test_a_detailed_result_of_vllms_bench_gives_its_requests_by_their_starts(tmp_path: Path) -> None:
    """Results are in the order of the dataset, failed requests have no output, `--append-result` adds lines."""
    result = {
        "request_throughput": 2.0,
        "start_times": [103.5, 102.5, 103.0],
        "input_lens": [30, 10, 20],
        "output_lens": [3, 1, 0],
    }
    later = {**result, "start_times": [203.5, 202.5, 203.0]}
    trace = read_trace(trace_of(tmp_path, [result, later]), None, keep_gaps=True)
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 10, 1), (1.0, 30, 3), (100.0, 10, 1), (101.0, 30, 3)
    ]  # fmt: skip
    assert trace.num_left_out == 2


def test_a_log_of_a_coordinator_gives_what_ended_by_its_arrival(tmp_path: Path) -> None:
    def line(ended_s: int, **fields: Any) -> dict[str, Any]:
        stamp = f"2026-11-27T08:00:{ended_s:02d}.500000Z"
        return {"timestamp": stamp, "service": "coordinator", "event": "request_ended", "code": "OK", **fields}

    lines = [
        line(1, event="ready"),
        line(9, duration_s=8.0, prompt_tokens=100, output_tokens=50, tenant="a"),
        line(20, duration_s=19.5, prompt_tokens=10, output_tokens=500, tenant="b"),
        line(21, duration_s=0.001, code="RESOURCE_EXHAUSTED"),
        {**line(22, duration_s=1.0, prompt_tokens=1, output_tokens=1), "service": "gateway"},
    ]
    trace = read_trace(trace_of(tmp_path, lines), None)
    assert [(r.at_s, r.prompt_tokens, r.output_tokens, r.tenant) for r in trace.requests] == [
        (0.0, 10, 500, "b"), (0.5, 100, 50, "a")
    ]  # fmt: skip
    assert trace.num_left_out == 1
    assert "--access-log" in refusal(lambda: read_trace(trace_of(tmp_path, lines[:1]), None))
    for broken in ({"timestamp": "noon"}, {"duration_s": -1}, {"prompt_tokens": "x"}, {"duration_s": None}):
        bad = [*lines, {**lines[1], **broken}]
        assert "line 6" in refusal(lambda bad=bad: read_trace(trace_of(tmp_path, bad), None))
