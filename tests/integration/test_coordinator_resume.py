"""A client that lost its stream takes it up: no token is missing and none comes twice."""

from __future__ import annotations

import json

import pytest

from specdec.client import Client, Completion, resumed_request
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Cancelled, DataLoss, FailedPrecondition, InvalidRequest
from tests.support.scripted.model import identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Result,
    collect,
    error_of,
    expected_ids,
    read_tokens,
    request,
    resumed,
    running,
)


async def test_a_client_that_lost_its_stream_takes_it_up_where_it_was() -> None:
    target = ScriptedTarget()
    body = request(max_tokens=60, n=2)
    async with running([target]) as harness:
        call = harness.stub.Generate(body)
        target.limit = 20
        first = await read_tokens(call, 7)
        call.cancel()
        target.set_limit(None)
        rest = await collect(harness.stub.Generate(resumed(first, body)))
        whole = await collect(harness.stub.Generate(body))
    for index in range(2):
        expected = expected_ids(target, 60, choice=index)
        assert first.ids(index) + rest.ids(index) == whole.ids(index) == expected
        assert first.texts.get(index, "") + rest.texts[index] == whole.texts[index]
    assert rest.finished is not None
    assert rest.finished.usage.completion_tokens == 120


async def test_resuming_works_on_another_coordinator_that_never_heard_of_the_request() -> None:
    target = ScriptedTarget()
    target.limit = 12
    body = request(max_tokens=60)
    async with running([target]) as harness:
        first = await read_tokens(harness.stub.Generate(body), 12)
    target = ScriptedTarget()
    async with running([target], owner_id="coordinator-2") as harness:
        rest = await collect(harness.stub.Generate(resumed(first, body)))
        whole = await collect(harness.stub.Generate(body))
    assert first.ids() + rest.ids() == expected_ids(target, 60)
    assert first.texts[0] + rest.texts[0] == whole.texts[0]
    assert [num for _, _, num in target.opened] == [15, 3]


async def test_resuming_a_live_request_takes_it_over_and_the_old_stream_ends() -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60, request_id="mine")
    async with running([target]) as harness:
        old = harness.stub.Generate(body)
        first = await read_tokens(old, 10)
        target.set_limit(None)
        new = harness.stub.Generate(resumed(first, body))
        rest = await collect(new)
        error = await error_of(old)
    assert isinstance(error, Cancelled)
    assert error.reason == "TAKEN_OVER"
    assert first.ids() + rest.ids() == expected_ids(target, 60)


async def test_resuming_with_tokens_that_were_never_sent_is_data_loss() -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60)
    async with running([target]) as harness:
        call = harness.stub.Generate(body)
        first = await read_tokens(call, 10)
        again = resumed(first, body)
        again.resume.choices[0].token_ids[3] ^= 1
        error = await error_of(harness.stub.Generate(again))
    assert isinstance(error, DataLoss)


async def test_resuming_what_had_already_ended_gives_the_rest_without_a_session() -> None:
    target = ScriptedTarget()
    body = request(max_tokens=20)
    async with running([target]) as harness:
        whole = await collect(harness.stub.Generate(body))
        first = Result(started=whole.started, texts={0: ""}, tokens={0: whole.tokens[0][:5]})
        rest = await collect(harness.stub.Generate(resumed(first, body)))
    assert rest.ids() == whole.ids()[5:]
    assert rest.texts[0] == whole.texts[0]
    assert rest.ended[0].reason == pb.FINISH_REASON_LENGTH
    assert len(target.opened) == 1


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("resume.resume_token", {"seed": 12}),
        ("resume.choices[0].text_offset_bytes", {"text_offset_bytes": 10_000}),
        ("resume.choices[0].index", {"index": 1}),
    ],
)
async def test_a_resume_that_does_not_fit_is_refused(field: str, change: dict[str, int]) -> None:
    target = ScriptedTarget()
    body = request(max_tokens=20)
    async with running([target]) as harness:
        whole = await collect(harness.stub.Generate(body))
        again = resumed(whole, body, **{k: v for k, v in change.items() if k != "seed"})
        if "seed" in change:
            again.sampling.seed = change["seed"]
        error = await error_of(harness.stub.Generate(again))
        # The place in the running set is free again, and the id too.
        assert (await collect(harness.stub.Generate(body))).ids() == whole.ids()
    assert isinstance(error, InvalidRequest)
    assert error.field == field


@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_conversation_is_not_resumed_where_another_template_would_render_it(is_chat: bool) -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for number, target in enumerate(targets):
        target.tokenizer_config = json.dumps({"chat_template": f"{number}{{{{ messages[0].content }}}}"})
    chat = api.ChatMessages(messages=[api.ChatMessage(role="user", content="the fox")])
    body = request(messages=chat) if is_chat else request()
    held = Completion()
    targets[0].limit = 7
    async with running(targets[:1]) as harness:
        async for chunk in harness.stub.Generate(body):
            held.add(chunk)
            if held.num_tokens == 7:
                break
        assert held.started is not None and held.started.chat_template_digest
        again = resumed_request(body, held)
    async with running(targets[1:], owner_id="coordinator-2") as harness, Client(harness.address) as client:
        if not is_chat:
            rest = await client.complete(again)
            assert held.choices[0].token_ids + rest.choices[0].token_ids == expected_ids(targets[1], 20)
            return
        with pytest.raises(FailedPrecondition, match=r"resume\.chat_template_digest") as refused:
            await client.complete(again)
    assert refused.value.reason == "CHAT_TEMPLATE_CHANGED"


async def begun_at(target: ScriptedTarget, body: api.GenerateRequest) -> api.GenerateRequest:
    """The request that resumes `body` after seven tokens from a coordinator with this target."""
    held = Completion()
    target.limit = 7
    async with running([target]) as harness:
        async for chunk in harness.stub.Generate(body):
            held.add(chunk)
            if held.num_tokens == 7:
                break
    return resumed_request(body, held)


async def test_a_stream_is_not_resumed_with_another_config_json() -> None:
    again = await begun_at(ScriptedTarget(identity(config_digest="c1")), request())
    for digest in ("c2", "c1", ""):
        target = ScriptedTarget(identity(config_digest=digest))
        async with running([target], owner_id="coordinator-2") as harness:
            call = harness.stub.Generate(again)
            if digest == "c2":
                error = await error_of(call)
                assert (type(error), error.reason) == (FailedPrecondition, "MODEL_CHANGED")
                assert "config.json" in str(error)
            else:
                assert (await collect(call)).ids() == expected_ids(target, 20)[7:]


async def test_a_resumed_stream_keeps_the_sampling_defaults_that_it_began_with() -> None:
    body = request()
    body.sampling.ClearField("max_tokens")
    again = await begun_at(ScriptedTarget(identity(sampling_defaults={"max_new_tokens": 30})), body)
    target = ScriptedTarget(identity(sampling_defaults={"max_new_tokens": 10}))
    async with running([target], owner_id="coordinator-2") as harness:
        rest = await collect(harness.stub.Generate(again))
        again.resume.model.sampling_defaults.top_p = 2.0
        error = await error_of(harness.stub.Generate(again))
    assert rest.ids() == expected_ids(target, 30)[7:]
    assert isinstance(error, InvalidRequest)
    assert error.field == "resume.model"
