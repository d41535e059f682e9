"""Acceptance by kind of prompt, position and drafter, from made-up steps."""

from __future__ import annotations

import pytest

from specdec.commands.measuring.breakdown import breakdown_of, breakdown_plots, breakdown_tables, bucket_of
from specdec.commands.measuring.served import Load, LoadRun
from specdec.commands.measuring.streams import Stream
from specdec.commands.measuring.summary import rows_of
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

LOAD = Load(concurrency=1)
# A chain of two by the draft; beside its second token one of ngram's, and below that one that was not verified.
TREE = pb.StepTree(
    token_ids=[1, 2, 3, 4],
    parents=[-1, 0, 0, 2],
    verified=[0, 1, 2],
    logprobs=[-1.0, -1.0, -1.0],
    accepted=[0, 2],
    drafters=["draft_model", "ngram"],
    proposed_by=bytes([0, 0, 1, 1]),
)


def stream(*starts: int, gaps_s: float = 0.01, num_tokens: int = 10, accepted: int = 1) -> Stream:
    """A request with a step of TREE, which commits three tokens, at each of these indexes."""
    stats = api.SpeculationStats(num_steps=5, num_verify_steps=4, num_proposed=4, num_accepted=accepted)
    stats.verified_by_depth.extend([4])
    stats.accepted_by_depth.extend([accepted])
    stats.drafters.add(name="ngram", num_proposed=2, cost_ms=0.5)
    return Stream(
        gaps_s=[gaps_s] * (num_tokens - 1),
        token_ids=[7] * num_tokens,
        ended_s=50.0,
        finished=api.GenerateFinished(stats=stats),
        steps=[api.DecodingStep(num_tokens=1), *(api.DecodingStep(start=s, num_tokens=3, tree=TREE) for s in starts)],
    )


def told(*streams: Stream) -> LoadRun:
    return LoadRun(LOAD, True, 0, list(streams), 1.0, tells_steps=True)


def test_each_drafter_has_what_it_was_first_to_propose_and_what_became_of_it() -> None:
    draft, ngram = breakdown_of([told(stream(1), stream(1))])["by_drafter"]
    assert (draft["drafter"], ngram["drafter"]) == ("draft_model", "ngram")
    counts = ("num_proposed", "num_verified", "num_accepted")
    assert [draft[name] for name in counts] == [4, 4, 2]
    assert [ngram[name] for name in counts] == [4, 2, 2]
    assert draft["acceptance_by_depth"] == [1.0, 0.0]
    assert ngram["acceptance_by_depth"] == [None, 1.0]
    assert draft["output_share"] == ngram["output_share"] == pytest.approx(2 / 20)
    assert (draft["cost_ms"], ngram["cost_ms"]) == (None, 1.0)


def test_of_targets_that_do_not_say_who_proposed_it_is_not_told() -> None:
    silent = stream(1)
    silent.steps[1].tree.ClearField("drafters")
    silent.steps[1].tree.ClearField("proposed_by")
    (row,) = breakdown_of([told(silent)])["by_drafter"]
    assert (row["drafter"], row["num_verified"], row["num_accepted"]) == ("unknown", 3, 2)


def test_steps_count_at_the_position_of_their_first_token_and_plain_ones_nowhere() -> None:
    rows = breakdown_of([told(stream(1, 15, 16, 40))])["by_position"]
    assert [(row["first_position"], row["last_position"], row["num_verify_steps"]) for row in rows] == [
        (1, 16, 2), (17, 32, 1), (33, 64, 1)
    ]  # fmt: skip
    assert {row["mean_acceptance_length"] for row in rows} == {3.0}
    assert {row["accepted_share"] for row in rows} == {2 / 3}


@pytest.mark.parametrize(
    ("start", "bucket"),
    [(0, (1, 16)), (15, (1, 16)), (16, (17, 32)), (31, (17, 32)), (32, (33, 64)), (1000, (513, 1024))],
)
def test_each_part_ends_at_twice_the_position_of_the_one_before(start: int, bucket: tuple[int, int]) -> None:
    assert bucket_of(start) == bucket


def test_requests_have_the_kinds_of_their_prompts_which_come_in_turns() -> None:
    code, prose, other = stream(accepted=4), stream(accepted=2), stream(accepted=0)
    slow = [stream(gaps_s=0.03), stream(gaps_s=0.005), stream(), stream(gaps_s=0.05)]
    passes = [
        LoadRun(LOAD, True, 0, [code, prose, other, code], 1.0),
        LoadRun(LOAD, False, 0, slow, 1.0),
        told(stream(1)),
    ]
    rows = breakdown_of(passes, ("code", "prose", ""))["by_kind"]
    assert [(row["kind"], row["num_requests"]) for row in rows] == [("code", 2), ("prose", 1), (None, 1)]
    assert [row["accepted_share"] for row in rows] == [1.0, 0.5, 0.0]
    assert rows[0]["decoding_speedup"] == pytest.approx(4.0)  # 3 times and 5 times as long without
    assert rows[1]["decoding_speedup"] == pytest.approx(0.5)
    assert rows[0]["output_shares"] == {"draft_model": 0.1, "ngram": 0.1}


def test_where_no_prompt_has_a_kind_there_are_no_rows_by_kind() -> None:
    found = breakdown_of([LoadRun(LOAD, True, 0, [stream()], 1.0), told(stream(1))], ("", ""))
    assert found["by_kind"] == []
    assert [table.title for table in breakdown_tables(found, "t")] == [
        "Acceptance by position, t",
        "Acceptance by drafter, t",
    ]


def test_tables_and_plots_have_what_was_found_and_nothing_of_what_was_not() -> None:
    found = breakdown_of([LoadRun(LOAD, True, 0, [stream()], 1.0), told(stream(1, 20))], ("code",))
    tables = breakdown_tables(found, "t")
    assert [len(table.rows) for table in tables] == [1, 2, 2]
    assert "- 1.00" in tables[2].rows[1]
    plots = breakdown_plots(found, "note")
    assert set(plots) == {"acceptance-kind", "acceptance-drafter", "acceptance-position"}
    assert "code, 1 at once" in plots["acceptance-kind"]
    nothing = breakdown_of([LoadRun(LOAD, True, 0, [Stream(failure="INTERNAL")], 1.0)], ("code",))
    assert breakdown_tables(nothing, "t") == []
    assert breakdown_plots(nothing, "note") == {}


def test_runs_that_tell_their_steps_count_for_no_speed() -> None:
    (row,) = rows_of([LoadRun(LOAD, True, 0, [stream()], 1.0), told(stream(1), stream(1))])
    assert (row["num_runs"], row["num_requests"]) == (1, 1)
