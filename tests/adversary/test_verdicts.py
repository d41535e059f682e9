"""What a run is judged by: answers, standstills, recovery times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.client import Completion
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.adversary.progress import Progress
from tests.adversary.recovery import EventRecord, markdown, percentile, table
from tests.adversary.verdict import Verdict
from tests.adversary.workload import Sizes, difference, make_requests, prefix_difference


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer() -> Completion:
    completion = Completion()
    prompt = api.PromptLogprobs(token_ids=[1, 2], positions=[pb.PositionLogprobs()])
    completion.add(api.GenerateResponse(prompt_logprobs=prompt))
    for index in (0, 1):
        delta = api.ChoiceDelta(index=index, text="ab", tokens=[api.OutputToken(id=5), api.OutputToken(id=6)])
        completion.add(api.GenerateResponse(delta=delta))
        end = api.ChoiceFinished(index=index, reason=pb.FINISH_REASON_STOP, stop_string="b")
        completion.add(api.GenerateResponse(choice_finished=end))
    completion.add(api.GenerateResponse(finished=api.GenerateFinished()))
    return completion


def change_token(completion: Completion) -> None:
    completion.choices[1].tokens[1].id = 7


def lose_token(completion: Completion) -> None:
    completion.choices[0].tokens.pop()


def repeat_token(completion: Completion) -> None:
    completion.choices[0].tokens.append(api.OutputToken(id=6))


def change_text(completion: Completion) -> None:
    completion.choices[0].text = "a"


def change_logprob(completion: Completion) -> None:
    completion.choices[0].tokens[0].logprobs.CopyFrom(pb.PositionLogprobs())


def change_reason(completion: Completion) -> None:
    completion.choices[0].finished.reason = pb.FINISH_REASON_LENGTH  # type: ignore[union-attr]


def change_stop_string(completion: Completion) -> None:
    completion.choices[0].finished.stop_string = "c"  # type: ignore[union-attr]


def lose_choice(completion: Completion) -> None:
    del completion.choices[1]


def lose_end(completion: Completion) -> None:
    completion.finished = None


def change_prompt_logprobs(completion: Completion) -> None:
    completion.prompt_logprobs = None


@pytest.mark.parametrize(
    "change",
    [
        change_token,
        lose_token,
        repeat_token,
        change_text,
        change_logprob,
        change_reason,
        change_stop_string,
        lose_choice,
        lose_end,
        change_prompt_logprobs,
    ],
)
def test_whatever_differs_from_the_undisturbed_run_is_found(change: Callable[[Completion], None]) -> None:
    changed = answer()
    assert difference(changed, answer()) is None
    change(changed)
    assert difference(changed, answer()) is not None


def test_what_was_cut_off_must_be_the_beginning_of_the_undisturbed_run() -> None:
    part = Completion()
    part.add(api.GenerateResponse(delta=api.ChoiceDelta(index=0, text="a", tokens=[api.OutputToken(id=5)])))
    assert prefix_difference(part, answer()) is None
    part.choices[0].tokens[0].id = 6
    assert prefix_difference(part, answer()) is not None


def test_requests_are_the_same_every_time_and_of_all_sorts() -> None:
    requests = make_requests(96, Sizes())
    assert requests == make_requests(96, Sizes())
    assert {body.sampling.temperature for body in requests} == {0.0, 0.7, 1.0}
    assert {body.sampling.n for body in requests} == {1, 2, 3}
    rejection = [b for b in requests if b.speculation.verify_mode == pb.VERIFY_MODE_REJECTION]
    assert rejection
    assert all(body.sampling.temperature == 0.0 for body in rejection), "its samples depend on what drafts propose"
    for name in ("logprobs", "prompt_logprobs", "repetition_penalty", "top_p"):
        assert 0 < sum(body.sampling.HasField(name) for body in requests) < 96
    assert any(body.sampling.stop for body in requests)


def test_a_choice_that_stands_is_found_though_its_sibling_moves() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.begin("stream", 2)
    clock.now = 1.0
    window = progress.open_window()
    for clock.now in (2.0, 5.0, 9.0):
        progress.move("stream", 0)
    clock.now = 12.0
    assert [(stream.name, stood_s) for stream, stood_s in progress.stuck(10.0)] == [("stream", 12.0)]
    assert progress.stuck(10.0) == [], "told once"
    assert not progress.have_all_moved_since(1.0)
    progress.move("stream", 1)
    progress.close_window(window)
    assert window.worst_s == 11.0, "counted from the window's beginning"
    assert progress.have_all_moved_since(1.0)


def test_a_standstill_is_counted_only_from_when_there_is_somebody_to_serve_it() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.begin("stream", 1)
    clock.now = 30.0
    assert progress.stuck(10.0, since_s=float("inf")) == []
    assert progress.stuck(10.0, since_s=25.0) == []
    assert len(progress.stuck(10.0, since_s=15.0)) == 1


def test_a_choice_that_has_ended_stands_no_more() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.begin("stream", 2)
    progress.move("stream", 0, is_end=True)
    clock.now = 8.0
    progress.move("stream", 1)
    clock.now = 12.0
    assert progress.stuck(10.0) == []
    assert progress.have_all_moved_since(8.0)


def test_the_table_has_a_row_per_kind_with_its_failures_and_one_for_pairs() -> None:
    records = [
        EventRecord(index=0, label="a", description="", leaves_nobody=False, stalls_s=[0.5, 1.0], whole_s=2.0),
        EventRecord(index=1, label="a", description="", leaves_nobody=False, stalls_s=[3.0]),
        EventRecord(index=2, label="a + b", description="", leaves_nobody=False, stalls_s=[5.0], whole_s=1.0),
    ]
    verdict = Verdict(lambda text: None)
    verdict.event = 1
    verdict.fail("stuck", "...")
    rows = table(records, verdict.failures)
    assert [(row.label, row.num_events, row.p50_s, row.p99_s, row.failures) for row in rows] == [
        ("a", 2, 1.0, 3.0, "1 stuck"),
        ("two at once", 1, 5.0, 5.0, ""),
    ]
    assert "| a | 2 | 3 | 1.00 s | 3.00 s | 3.00 s | 2.0 s | 1 stuck |" in markdown(rows)


def test_percentiles_are_values_that_were_measured() -> None:
    values = list(range(1, 101))
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([4.0], 0.99)) == (50, 99, 4.0)
