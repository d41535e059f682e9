"""Output, statistics, journal, resume tokens and the client's stream, each on its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.coordinator.intake.resume import agree, check_resume_token, make_resume_token
from specdec.coordinator.replicas.compatibility import difference
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.tally import SpeculationTally, total
from specdec.coordinator.text.choice_output import ChoiceOutput, EndRules, Finish
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import DataLoss, InvalidRequest, Unavailable
from tests.support.scripted.model import make_tokenizer


class Letters:
    """A detokenizer for tests: id n is the n-th letter."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def finish(self) -> str:
        return ""


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def test_tokens_past_a_stop_string_are_not_kept() -> None:
    output = ChoiceOutput(Letters(), ["cd"])
    assert output.take_tokens(ids("abc")).text == "ab"
    step = output.take_tokens(ids("dzz"), Finish(pb.FINISH_REASON_LENGTH))
    assert (step.num_kept, step.text) == (1, "")
    assert step.finish == Finish(pb.FINISH_REASON_STOP, stop_string="cd")


def test_text_held_back_for_a_stop_string_comes_out_when_the_choice_ends_otherwise() -> None:
    output = ChoiceOutput(Letters(), ["cd"])
    step = output.take_tokens(ids("abc"), Finish(pb.FINISH_REASON_LENGTH))
    assert (step.num_kept, step.text) == (3, "abc")


def test_a_stop_string_before_min_tokens_is_text() -> None:
    output = ChoiceOutput(Letters(), ["b"], min_tokens=3)
    assert output.take_tokens(ids("ab")).text == "ab"
    step = output.take_tokens(ids("cb"))
    assert (step.num_kept, step.text) == (2, "c")


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "abz")])
def test_a_stop_tokens_text_is_left_out_unless_stops_are_kept(keep: bool, text: str) -> None:
    output = ChoiceOutput(Letters(), [], keep_stop=keep)
    step = output.take_tokens(ids("abz"), Finish(pb.FINISH_REASON_STOP, stop_token_id=25))
    assert (step.num_kept, step.text) == (3, text)


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.integers(0, 29)),
    st.lists(st.text("abc", min_size=1, max_size=3)),
)
def test_replaying_tokens_gives_what_streaming_them_gave(text: str, cuts: list[int], stops: list[str]) -> None:
    rules = EndRules(frozenset(ids("c")), min_tokens=4, max_tokens=20)
    replayed = ChoiceOutput(Letters(), stops, min_tokens=4).replay(ids(text), rules)
    streamed = stream(ids(text), sorted(set(cuts)), stops, rules)
    assert (replayed.num_kept, replayed.text, replayed.finish) == streamed


def stream(
    token_ids: Sequence[int], cuts: list[int], stops: list[str], rules: EndRules
) -> tuple[int, str, Finish | None]:
    """As verdicts would bring them: the target ends the choice by its tokens, the coordinator by its text."""
    ends = next((n for n, t in enumerate(token_ids, 1) if rules.finish_after(t, n) is not None), len(token_ids))
    finish = rules.finish_after(token_ids[ends - 1], ends) if token_ids else None
    output, kept, text = ChoiceOutput(Letters(), stops, min_tokens=4), 0, ""
    borders = [c for c in cuts if c < ends] + [ends]
    for start, end in zip([0, *borders], borders, strict=False):
        step = output.take_tokens(token_ids[start:end], finish if end == ends else None)
        kept, text = kept + step.num_kept, text + step.text
        if step.finish is not None:
            return kept, text, step.finish
    return kept, text, None


def test_statistics_count_what_survived_and_leave_the_rest_of_the_time_outside() -> None:
    tally = SpeculationTally(admission_s=0.5)
    tally.add(pb.Verdict(token_ids=[1], queue_us=1000, prefill_us=2000, step_us=2000), 1, True, 10.0)
    verify = pb.Verdict(
        token_ids=[1, 2, 3], verified_by_depth=[2, 1, 1], num_accepted=2, hit=True, step_us=3000,
        hold_off_us=500, draft_us=700, num_wasted=2,
    )  # fmt: skip
    tally.add(verify, 3, False, 10.005)
    tally.add(pb.Verdict(token_ids=[4], step_us=1000), 1, False, 10.010)
    stats = tally.to_proto()
    assert (stats.num_steps, stats.num_verify_steps, stats.num_proposed, stats.num_accepted) == (2, 1, 4, 2)
    assert list(stats.verified_by_depth) == [1, 1, 1]
    assert list(stats.accepted_by_depth) == [1, 1]
    assert (stats.mean_acceptance_length, stats.hit_rate, stats.num_wasted) == (3.0, 0.5, 2)
    assert stats.queue_ms == pytest.approx(501.0)
    assert stats.prefill_ms == pytest.approx(2.0)
    assert stats.verify_ms == pytest.approx(4.0)
    assert stats.outside_ms == pytest.approx(10.0 - 4.0 - 0.5)
    twice = total([tally, tally])
    assert twice.num_steps == 4
    assert list(twice.accepted_by_depth) == [2, 2]
    assert twice.mean_acceptance_length == 3.0


def test_accepted_tokens_that_a_stop_string_cut_off_do_not_count() -> None:
    tally = SpeculationTally()
    verdict = pb.Verdict(token_ids=[1, 2, 3], verified_by_depth=[1, 1], num_accepted=2)
    tally.add(verdict, 1, False, 1.0)
    assert tally.to_proto().num_accepted == 1


def test_no_session_moves_between_targets_of_different_configs() -> None:
    identities = [pb.ModelIdentity(name="m", weights_digest="w", config_digest=digest) for digest in ("a", "b", "")]
    ours, theirs, former = identities
    assert "another config.json at each (a, b)" in str(difference(ours, theirs, allow_mixed_numerics=True))
    assert difference(ours, former, allow_mixed_numerics=False) is None
    assert difference(ours, ours, allow_mixed_numerics=False) is None


def test_a_resume_token_belongs_to_one_id_seed_model_tenant_and_secret() -> None:
    parts = {"name": "m", "revision": "r", "weights_digest": "w", "tokenizer_digest": "t"}
    identity = pb.ModelIdentity(**parts)
    token = make_resume_token(b"secret", "tenant", "id", 7, identity)
    check_resume_token(token, make_resume_token(b"secret", "tenant", "id", 7, identity))
    others = [
        make_resume_token(b"secre2", "tenant", "id", 7, identity),
        make_resume_token(b"secret", "another", "id", 7, identity),
        make_resume_token(b"secret", "tenant", "di", 7, identity),
        make_resume_token(b"secret", "tenan", "tid", 7, identity),
        make_resume_token(b"secret", "tenant", "id", 8, identity),
        *(
            make_resume_token(b"secret", "tenant", "id", 7, pb.ModelIdentity(**{**parts, part: "another"}))
            for part in parts
        ),
    ]
    for other in others:
        with pytest.raises(InvalidRequest):
            check_resume_token(token, other)


def test_client_and_journal_agree_on_the_longer_of_the_two() -> None:
    assert agree(0, [1, 2], [1, 2, 3]) == [1, 2, 3]
    assert agree(0, [1, 2, 3], [1]) == [1, 2, 3]
    with pytest.raises(DataLoss, match="token 1"):
        agree(0, [1, 2], [1, 9])


async def test_deltas_behind_a_slow_write_are_merged_per_choice() -> None:
    stream = ClientStream()
    detokenizers = DetokenizerFactory(make_tokenizer())
    for index, text in ((0, "a"), (0, "b"), (1, "x"), (0, "c")):
        stream.output(index, text, detokenizers, [1], [pb.ORIGIN_DECODE])
    stream.close()
    chunks = []
    while (chunk := await stream.take()) is not None:
        chunks.append((chunk.delta.index, chunk.delta.text, len(chunk.delta.tokens)))
    assert chunks == [(0, "ab", 2), (1, "x", 1), (0, "c", 1)]


async def test_a_failed_stream_delivers_what_was_queued_before_the_error() -> None:
    stream = ClientStream()
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    detokenizers = DetokenizerFactory(make_tokenizer())
    stream.output(0, "a", detokenizers)
    stream.close(Unavailable("gone"))
    stream.output(0, "never", detokenizers)
    chunk = await reader
    assert chunk is not None
    assert chunk.delta.text == "a"
    with pytest.raises(Unavailable):
        await stream.take()


def test_the_coordinator_needs_no_tensors() -> None:
    # They are made impossible to import: redis-py takes numpy where it is there.
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'numpy')))\n"
        "import coordinator.__main__, specdec.commands.app"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
