"""No message outgrows what its receiver takes: it is cut, refused before anybody sees it, or costs one session."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import FailedPrecondition, InvalidRequest
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES, most_entry_bytes
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity, make_tokenizer
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    collect,
    error_of,
    expected_ids,
    read_tokens,
    request,
    resumed,
    running,
)

SMALL = {"max_message_bytes": MIN_MESSAGE_BYTES}
WIDE = 2**20
"""A vocabulary in which many tokens can have a bias."""


def small_target(**changes: Any) -> ScriptedTarget:
    target = ScriptedTarget(identity(**changes))
    target.max_message_bytes = MIN_MESSAGE_BYTES
    return target


def states(harness: Harness) -> list[str]:
    return [str(link.state) for link in harness.service.fleet.links]


def too_large() -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason="MESSAGE_TOO_LARGE", domain="specdec")
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="max_message_bytes: too much to tell")
    status.details.add().Pack(info)
    return status


async def test_peers_tell_each_other_what_they_take() -> None:
    target = small_target()
    async with running([target], max_message_bytes=2 * MIN_MESSAGE_BYTES) as harness:
        await harness.all_ready()
        [link] = harness.service.fleet.links
        assert link.message_bytes == MIN_MESSAGE_BYTES
    assert target.attaches[0].max_message_bytes == 2 * MIN_MESSAGE_BYTES


async def test_many_openings_leave_in_frames_that_the_target_takes() -> None:
    target = small_target(max_model_len=20_000)
    target.limit = 0
    prompt = [5 + index % 200 for index in range(15_000)]
    async with running([target], **SMALL, max_running=64) as harness:
        calls = [harness.stub.Generate(request(prompt, max_tokens=3)) for _ in range(12)]
        await target.until(lambda: len(target.sessions) == 12)
        target.break_streams()
        await target.until(lambda: len(target.attaches) == 2)
        target.set_limit(None)
        for call in calls:
            assert (await collect(call)).ids() == expected_ids(target, 3, prompt)
    assert max(frame.ByteSize() for frame in target.frames) <= MIN_MESSAGE_BYTES
    assert sum(frame.ByteSize() for frame in target.frames) > 10 * 15_000


async def test_an_attach_lists_as_many_sessions_as_a_message_holds_and_the_others_are_opened_again() -> None:
    target = small_target()
    target.limit = 4
    num_sessions = 700
    async with running([target], **SMALL, max_running=2 * num_sessions, owner_id="o" * 60) as harness:
        calls = [harness.stub.Generate(request(seed=seed, max_tokens=8, n=10)) for seed in range(num_sessions // 10)]
        await target.until(lambda: len(target.sessions) == num_sessions)
        await target.until(lambda: all(len(s.token_ids) == 7 for s in target.sessions.values()))
        target.break_streams()
        await target.until(lambda: len(target.attaches) == 2)
        target.set_limit(None)
        for seed, call in enumerate(calls):
            result = await collect(call)
            assert [result.ids(i) for i in range(10)] == [
                expected_ids(target, 8, seed=seed, choice=i) for i in range(10)
            ]
        assert harness.metric("token_mismatches_total") == 0
    assert 0 < len(target.attaches[1].sessions) < num_sessions
    assert max(frame.ByteSize() for frame in target.frames) <= MIN_MESSAGE_BYTES
    listed = {told.session_id for told in target.attaches[1].sessions}
    again = {session_id for session_id, epoch, _ in target.opened if epoch > 1}
    assert listed.isdisjoint(again)
    assert len(listed) + len(again) == num_sessions


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("sampling.logit_bias", {"logit_bias": dict.fromkeys(range(8000), 1.0)}),
        ("prompt_token_ids", {"prompt_ids": [WIDE - 1] * 20_000, "max_tokens": 3000}),
        ("prompt", {"prompt": "fox " * 20_000, "max_tokens": 3000}),
    ],
)
async def test_a_request_that_no_target_could_open_is_refused_before_any_sees_it(
    field: str, changes: dict[str, Any]
) -> None:
    target = small_target(vocab_size=WIDE, max_model_len=100_000)
    async with running([target], max_logit_bias=10_000) as harness:
        await harness.all_ready()
        error = await error_of(harness.stub.Generate(request(**changes)))
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert str(most_entry_bytes(MIN_MESSAGE_BYTES)) in error.description
    assert target.opened == []


async def test_a_request_goes_to_the_target_that_takes_its_opening() -> None:
    targets = [small_target(vocab_size=WIDE), ScriptedTarget(identity(vocab_size=WIDE))]
    async with running(targets, max_logit_bias=10_000) as harness:
        await harness.all_ready()
        for seed in range(4):
            body = request(seed=seed, logit_bias=dict.fromkeys(range(8000), 1.0))
            assert (await collect(harness.stub.Generate(body))).ids() == expected_ids(targets[1], 20, seed=seed)
        assert states(harness) == ["ready", "ready"]
    assert targets[0].opened == []


async def test_a_draft_that_takes_too_little_for_a_session_costs_it_its_draft_alone() -> None:
    target, draft = ScriptedTarget(identity(vocab_size=WIDE)), ScriptedDraft(identity("d", vocab_size=WIDE))
    draft.max_message_bytes = MIN_MESSAGE_BYTES
    async with running([target], [draft], max_logit_bias=10_000, ejection_failures=1) as harness:
        body = request(logit_bias=dict.fromkeys(range(8000), 1.0))
        assert (await collect(harness.stub.Generate(body))).ids() == expected_ids(target, 20)
        assert harness.metric("draft_fallbacks_total", cause="message_too_large") == 1
        assert draft.opened == []
        other = await collect(harness.stub.Generate(request(seed=3)))
        assert other.ids() == expected_ids(target, 20, seed=3)
        assert states(harness) == ["ready", "ready"]
    assert draft.opened


async def test_a_session_of_which_there_is_too_much_to_tell_ends_alone_and_nobody_is_blamed() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 5
    async with running(targets, ejection_failures=1) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request(seed=seed)) for seed in range(4)]
        for call in calls:
            await read_tokens(call, 5)
        target = targets[0] if targets[0].sessions else targets[1]
        guilty = next(iter(target.sessions.values()))
        target.fail_session(guilty.session_id, too_large())
        error = await error_of(calls[guilty.body.sampling.seed])
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "MESSAGE_TOO_LARGE"
        for each in targets:
            each.set_limit(None)
        for seed, call in enumerate(calls):
            if seed != guilty.body.sampling.seed:
                assert len((await collect(call)).ids()) == 15
        assert states(harness) == ["ready", "ready"]
        assert harness.metric("stream_reconnects_total", role="target") == 0
    assert len(targets[0].opened) + len(targets[1].opened) == 4


async def test_an_older_target_does_not_get_a_prompt_whose_log_probabilities_would_break_its_stream() -> None:
    older, newer = ScriptedTarget(), small_target()
    older.knows_parts = False
    prompt = [5 + index % 200 for index in range(2000)]
    async with running([older, newer], **SMALL, ejection_failures=1) as harness:
        await harness.all_ready()
        for seed in range(3):
            result = await collect(harness.stub.Generate(request(prompt, seed=seed, prompt_logprobs=20, max_tokens=3)))
            assert result.prompt_logprobs is not None
            assert len(result.prompt_logprobs.positions) == 1999
        small = [await collect(harness.stub.Generate(request(prompt_logprobs=2, seed=s))) for s in range(6)]
        assert all(result.ids() == expected_ids(older, 20, seed=s) for s, result in enumerate(small))
        assert states(harness) == ["ready", "ready"]
    assert len(newer.opened) >= 3


async def test_a_proposal_that_is_larger_than_any_costs_the_session_its_draft_and_no_target_sees_it() -> None:
    target, draft = small_target(), ScriptedDraft()
    draft.make_proposal = lambda session: bytes(50 * 1024)
    async with running([target], [draft], **SMALL) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=40)))
        assert result.ids() == expected_ids(target, 40)
        assert harness.metric("draft_fallbacks_total", cause="bad_proposal") >= 1
    assert target.num_relayed == 0


async def test_a_request_that_could_not_be_taken_up_again_is_refused() -> None:
    target = small_target(max_model_len=100_000)
    async with running([target], **SMALL, max_tokens_limit=50_000) as harness:
        error = await error_of(harness.stub.Generate(request(max_tokens=2000, n=16)))
        assert isinstance(error, InvalidRequest)
        assert error.field == "sampling.max_tokens"
        error = await error_of(harness.stub.Generate(request(prompt="fox " * 15_000, max_tokens=2000)))
        assert isinstance(error, InvalidRequest)
        assert error.field == "prompt"
        body = request(max_tokens=1500, n=16)
        target.limit = 1499
        call = harness.stub.Generate(body)
        first = await read_tokens(call, 1499)
        while any(len(first.ids(choice)) < 1499 for choice in range(16)):
            first.add(await call.read())
        again = resumed(first, body)
        target.set_limit(None)
        rest = await collect(harness.stub.Generate(again))
    assert 16 * 1499 < again.ByteSize() <= MIN_MESSAGE_BYTES
    assert [first.ids(i) + rest.ids(i) for i in range(16)] == [expected_ids(target, 1500, choice=i) for i in range(16)]


async def test_output_that_is_replayed_comes_in_chunks_that_clients_take() -> None:
    target = ScriptedTarget(identity(max_model_len=100_000))
    target.tokens_per_verdict = 64
    num_tokens = 40_000
    async with running([target], max_tokens_limit=num_tokens, credit_window_tokens=num_tokens) as harness:
        body = request(max_tokens=num_tokens, request_id="mine")
        whole = await collect(harness.stub.Generate(body))
        again = api.GenerateRequest()
        again.CopyFrom(body)
        assert whole.started is not None
        again.resume.resume_token = whole.started.resume_token
        options = [("grpc.max_receive_message_length", MIN_MESSAGE_BYTES)]
        async with grpc.aio.insecure_channel(harness.address, options=options) as channel:
            rest = await collect(api_grpc.CoordinatorServiceStub(channel).Generate(again))
        assert len(target.opened) == 1
    assert rest.ids() == whole.ids() == expected_ids(target, num_tokens)
    assert rest.texts == whole.texts


async def test_answers_that_cannot_be_cut_are_refused_with_what_they_are_of() -> None:
    target = ScriptedTarget(identity(max_model_len=100_000))
    async with running([target], **SMALL) as harness:
        tokenized = await error_of(harness.stub.Tokenize(api.TokenizeRequest(text="fox" * 15_000)))
        longest = max(range(300), key=lambda token: len(make_tokenizer().decode([token])))
        detokenize = api.DetokenizeRequest(token_ids=[longest] * 25_000)
        detokenized = await error_of(harness.stub.Detokenize(detokenize))
    assert isinstance(tokenized, InvalidRequest)
    assert tokenized.field == "text"
    assert isinstance(detokenized, InvalidRequest)
    assert detokenized.field == "token_ids"


async def test_a_verdict_that_goes_past_what_was_asked_for_opens_the_session_again() -> None:
    target = ScriptedTarget()
    target.limit = 3
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 3)
        [session] = target.sessions.values()
        flood = pb.Verdict(start_position=6, token_ids=[9] * 100_000, origins=[pb.ORIGIN_DECODE] * 100_000)
        target.limit = None
        target.emit(session, verdict=flood)
        while (chunk := await call.read()) is not grpc.aio.EOF:
            result.add(chunk)
        assert harness.metric("token_mismatches_total") == 1
    assert result.ids() == expected_ids(target, 20)


async def test_a_replica_that_says_too_much_of_its_model_is_not_used() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft(identity("d", architecture="x" * 5000))
    async with running([target], [draft], wait_for_draft=False) as harness:
        status = await harness.replica_until("draft", "incompatible")
        assert "bytes" in status.detail
        assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(target, 20)
