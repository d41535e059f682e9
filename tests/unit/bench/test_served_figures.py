"""What passes of the served benchmark say: ratios of neighbours, failures by name, percentiles, plots."""

from __future__ import annotations

import pytest

from specdec.commands.measuring.served import Load, LoadRun
from specdec.commands.measuring.streams import Stream
from specdec.commands.measuring.summary import acceptance, plots_of, rows_of, tables_of
from specdec.v1 import coordinator_pb2 as api


def ended(num_tokens: int = 10, first_s: float = 0.1, whole_s: float = 1.0, tokens: int = 7) -> Stream:
    stats = api.SpeculationStats(num_steps=5, num_verify_steps=4, num_proposed=8, num_accepted=4, num_hits=4)
    stats.mean_acceptance_length = 2.0
    stats.verified_by_depth.extend([4, 4])
    stats.accepted_by_depth.extend([3, 1])
    return Stream(
        first_s=first_s,
        gaps_s=[0.01] * (num_tokens - 1),
        token_ids=[tokens] * num_tokens,
        due_s=50.0,
        ended_s=50.0 + whole_s,
        finished=api.GenerateFinished(stats=stats),
    )


def one(load: Load, speculate: bool, repeat: int, streams: list[Stream], elapsed_s: float | None) -> LoadRun:
    return LoadRun(load, speculate, repeat, streams, elapsed_s)


def test_speed_up_is_the_median_of_ratios_of_neighbours() -> None:
    load = Load(concurrency=2)
    passes = []
    for repeat, (fast_s, slow_s) in enumerate([(1.0, 2.0), (2.0, 6.0), (1.0, 1.0)]):
        passes.append(one(load, True, repeat, [ended(), ended()], fast_s))
        passes.append(one(load, False, repeat, [ended(), ended()], slow_s))
    with_it, plain = rows_of(passes)
    assert with_it["speedup"]["median"] == pytest.approx(2.0)
    assert (with_it["num_equal"], with_it["num_compared"]) == (6, 6)
    assert with_it["tokens_per_s"]["median"] == 20.0
    assert "speedup" not in plain
    assert with_it["acceptance_by_depth"] == [0.75, 0.25]


def test_at_a_rate_speed_up_is_of_times_and_not_of_throughput() -> None:
    load = Load(rate=2.0)
    passes = [one(load, True, 0, [ended(whole_s=0.5)] * 3, 9.0), one(load, False, 0, [ended(whole_s=1.0)] * 3, 9.0)]
    assert rows_of(passes)[0]["speedup"]["median"] == pytest.approx(2.0)


def test_failures_are_counted_by_name_and_have_no_times() -> None:
    refused = Stream(failure="RESOURCE_EXHAUSTED (OVERLOADED)")
    late = Stream(first_s=0.2, token_ids=[1])
    row, plain = rows_of([
        one(Load(concurrency=1), True, 0, [ended(), refused, refused, late], 1.0),
        one(Load(concurrency=1), False, 0, [refused], 1.0),
    ])  # fmt: skip
    assert row["failures"] == {"RESOURCE_EXHAUSTED (OVERLOADED)": 2, "not ended when the run was over": 1}
    assert (row["num_failed"], row["num_requests"]) == (3, 4)
    assert row["first_token_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert plain["first_token_ms"] == {}
    names = [table.title for table in tables_of([row, plain], "t")]
    assert names == ["Speed, t", "Times in ms, t", "Acceptance, t", "Failures"]
    assert plots_of([row, plain], "note")


def test_an_interrupted_run_keeps_what_had_ended_and_counts_for_no_speed() -> None:
    load = Load(concurrency=4)
    (row,) = rows_of([one(load, True, 0, [ended(), Stream(first_s=0.1, token_ids=[1])], None)])
    assert (row["num_runs"], row["num_requests"], row["num_failed"]) == (0, 1, 0)
    assert row["tokens_per_s"] == {}
    assert tables_of([row], "t")


def test_acceptance_of_nothing_is_nothing() -> None:
    assert acceptance([])["hit_rate"] is None
    assert acceptance([api.SpeculationStats(num_steps=3)])["accepted_share"] is None


def test_tokens_that_differ_are_told() -> None:
    load = Load(concurrency=1)
    row, _ = rows_of([one(load, True, 0, [ended(tokens=7)], 1.0), one(load, False, 0, [ended(tokens=8)], 1.0)])
    assert (row["num_equal"], row["num_compared"]) == (0, 1)
