"""What a caller may try: messages made to cost more than they carry, and the requests and keys of others."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.coordinator.intake.prompt import PromptReader
from specdec.coordinator.intake.resume import make_resume_token
from specdec.coordinator.intake.text_limits import TokenizingTurns
from specdec.coordinator.intake.validation import Limits
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.store.interface import NewRequest, RequestKey, StoreUnavailable
from specdec.store.keys import StoreKeys
from specdec.store.urls import RedisOptions, connect
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest, SpecdecError, from_rpc_error
from tests.support.scripted.model import make_tokenizer
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.services.coordinator_harness import Harness, collect, expected_ids, request, resumed, running

CONTEXT = 4096
LONG_S = 600.0
TENANT = ((TENANT_KEY, "tenant"),)
# Names that look like parts of other keys.
NAMES = ["", "a", "a:live", "a}:live", "{a}", "a:request:b", "b", "*", "a*", "a\x00b", "%61", "é", "a" * 128, "a" * 129]


async def error_of(call: Any) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            await collect(call)
        else:
            await call
    return from_rpc_error(caught.value)


async def assert_serves(harness: Harness, target: ScriptedTarget) -> None:
    assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(target, 20)


async def test_lists_that_no_context_holds_are_refused_and_named() -> None:
    target = ScriptedTarget()
    messages = api.ChatMessages(messages=[api.ChatMessage()] * (CONTEXT + 1))
    many_ids = api.DetokenizeRequest(token_ids=[100] * (CONTEXT + 1))
    async with running([target]) as harness:
        calls = {
            "token_ids": harness.stub.Detokenize(many_ids),
            "messages.messages": harness.stub.Tokenize(api.TokenizeRequest(messages=messages)),
            "prompt_token_ids": harness.stub.Generate(
                api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=[10**6] * 1_000_000))
            ),
        }
        for field, call in calls.items():
            error = await error_of(call)
            assert isinstance(error, InvalidRequest)
            assert error.field == field
        most = api.DetokenizeRequest(token_ids=[100] * CONTEXT)
        assert len((await harness.stub.Detokenize(most)).text) >= CONTEXT
        await assert_serves(harness, target)


async def test_of_a_resume_with_more_tokens_than_a_choice_may_have_none_is_looked_at() -> None:
    target = ScriptedTarget()
    body = request(max_tokens=20)
    async with running([target]) as harness:
        whole = await collect(harness.stub.Generate(body))
        again = resumed(whole, body)
        again.resume.choices[0].token_ids.extend([10**6] * 1_000_000)
        error = await error_of(harness.stub.Generate(again))
        assert isinstance(error, InvalidRequest)
        assert error.field == "resume.choices[0].token_ids"
        assert "1000020 ids" in error.description
        again.resume.choices[0].token_ids.extend([10**6] * 2_000_000)  # more than is parsed
        error = await error_of(harness.stub.Generate(again))
        assert isinstance(error, InvalidRequest)
        assert error.field == "resume.choices.token_ids"
        await assert_serves(harness, target)


async def test_of_a_prompt_that_is_cut_only_the_kept_ids_are_looked_at_and_named_by_their_place() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        cut = request(prompt_token_ids=api.TokenIds(token_ids=[10**6, 5, 6, 7]), truncate_prompt_tokens=3)
        assert (await collect(harness.stub.Generate(cut))).ids() == expected_ids(target, 20)
        bad = request(prompt_token_ids=api.TokenIds(token_ids=[5, 6, 10**6, 7]), truncate_prompt_tokens=3)
        error = await error_of(harness.stub.Generate(bad))
    assert isinstance(error, InvalidRequest)
    assert error.field == "prompt_token_ids.token_ids[2]"


async def test_a_long_text_is_tokenised_without_holding_up_the_event_loop() -> None:
    tokenizer = TextTokenizer(make_tokenizer().to_str(), {})
    limits = Limits(
        vocab_size=10**6, max_model_len=CONTEXT, max_tokens=1, max_choices=1, max_stop_strings=1,
        max_stop_string_bytes=1, max_logprobs=1, max_logit_bias=1, max_prompt_bytes=2**24,
    )  # fmt: skip
    text = "été 🙂 the quick brown fox " * 20_000
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)
            num_turns += 1

    turning = asyncio.create_task(turn())
    reader = PromptReader(tokenizer, limits, TokenizingTurns())
    packed = await reader.convert("text", text, True, lambda token_ids: array("Q", token_ids).tobytes())
    turning.cancel()
    assert num_turns > 10
    assert list(array("Q", packed)) == tokenizer.encode(text)


async def test_a_long_conversation_is_rendered_without_holding_up_the_event_loop() -> None:
    template = "{% for m in messages %}{% for n in messages[:20] %}{{ n.role }}{% endfor %}{{ m.content }}{% endfor %}"
    tokenizer = TextTokenizer(make_tokenizer().to_str(), {"chat_template": template})
    limits = Limits(
        vocab_size=10**6, max_model_len=10**6, max_tokens=1, max_choices=1, max_stop_strings=1,
        max_stop_string_bytes=1, max_logprobs=1, max_logit_bias=1, max_prompt_bytes=2**24,
    )  # fmt: skip
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)
            num_turns += 1

    turning = asyncio.create_task(turn())
    reader = PromptReader(tokenizer, limits, TokenizingTurns())
    messages = api.ChatMessages(messages=[api.ChatMessage(role="u", content="fox ")] * 20_000)
    packed = await reader.convert_chat(messages, False, lambda token_ids: array("Q", token_ids).tobytes())
    turning.cancel()
    assert num_turns > 10
    assert list(array("Q", packed)) == tokenizer.encode(("u" * 20 + "fox ") * 20_000, add_special_tokens=False)


async def test_a_message_that_is_small_only_while_compressed_is_refused() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        bomb = api.TokenizeRequest(text="x" * 64_000_000)
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(harness.address, options=options) as channel:
            call: Any = channel.unary_unary(
                "/specdec.v1.CoordinatorService/Tokenize", request_serializer=api.TokenizeRequest.SerializeToString
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(bomb, compression=grpc.Compression.Gzip)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await assert_serves(harness, target)


async def test_metadata_beyond_sixteen_kilobytes_is_refused() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await harness.stub.GetStatus(api.GetStatusRequest(), metadata=(("x", "y" * 17_000),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await assert_serves(harness, target)


async def test_a_tenant_can_neither_resume_nor_abort_what_is_anothers() -> None:
    target = ScriptedTarget()
    target.set_limit(5)
    ours, theirs = ((TENANT_KEY, "ours"),), ((TENANT_KEY, "theirs"),)
    async with running([target]) as harness:
        running_one = harness.stub.Generate(request(request_id="one"), metadata=theirs)
        started = (await running_one.read()).started
        forged = request(request_id="one")
        forged.resume.resume_token = started.resume_token
        forged.sampling.seed = started.seed
        error = await error_of(harness.stub.Generate(forged, metadata=ours))
        assert error.reason == "RESUME_TOKEN_INVALID"
        forged.resume.resume_token = b"\0" * 32
        assert (await error_of(harness.stub.Generate(forged, metadata=theirs))).reason == "RESUME_TOKEN_INVALID"
        assert not (await harness.stub.Abort(api.AbortRequest(request_id="one"), metadata=ours)).aborted
        target.set_limit(10**6)
        assert (await collect(running_one)).ids() == expected_ids(target, 20)


def test_no_name_leads_to_the_keys_of_another() -> None:
    keys = StoreKeys()
    requests = [tuple(keys.request(RequestKey(*pair))) for pair in itertools.product(NAMES, NAMES)]
    heads, live = {head for head, _ in requests}, {live for _, live in requests}
    quotas = {keys.quota(name)[0] for name in NAMES}
    assert (len(heads), len(live), len(quotas)) == (len(NAMES) ** 2, len(NAMES), len(NAMES))
    assert heads.isdisjoint(live | quotas)
    assert live.isdisjoint(quotas)
    for key in heads | live | quotas:
        assert key.count("{") == key.count("}") == 1  # one hash tag, ours
        assert key.isprintable()
        assert key.isascii()


async def test_requests_with_any_names_are_kept_apart_in_redis(tmp_path: Path) -> None:
    pairs = [RequestKey(*pair) for pair in itertools.product(NAMES, NAMES)]
    with RedisServer(tmp_path) as server:
        store = connect(server.url, RedisOptions(timeout_s=20))
        for number, key in enumerate(pairs):
            params = str(number).encode()
            begun = await store.begin(key, NewRequest("owner", number, params, 1, LONG_S, take_over=False))
            assert begun.record is None
        for number, key in enumerate(pairs):
            record = await store.load(key)
            assert record is not None
            assert (record.seed, record.params) == (number, str(number).encode())
        await store.close()


@pytest.mark.parametrize("field", [{"owner": b"\xff\xfe"}, {"seed": b"x"}, {"generation": b"x"}])
async def test_a_record_that_somebody_spoilt_is_a_failure_of_the_store_and_of_nothing_else(
    tmp_path: Path, field: dict[str | bytes, str | bytes]
) -> None:
    key, new = RequestKey("tenant", "one"), NewRequest("owner", 1, b"params", 1, LONG_S, take_over=True)
    target = ScriptedTarget()
    with RedisServer(tmp_path) as server, server.client() as meddler:
        store = connect(server.url, RedisOptions(timeout_s=20))
        await store.begin(key, new)
        meddler.hset(StoreKeys().request(key)[0], mapping=field)
        with pytest.raises(StoreUnavailable):
            await store.load(key)
        await store.close()
        async with running([target], redis_url=server.url, redis_timeout_s=20) as harness:
            body = request(request_id="one")
            resumed = request(request_id="one", resume=api.Resume(resume_token=token_of(harness, body)))
            assert (await collect(harness.stub.Generate(resumed, metadata=TENANT))).ids() == expected_ids(target, 20)


def token_of(harness: Harness, body: api.GenerateRequest) -> bytes:
    """The token that a coordinator which never saw the spoilt record gave out."""
    served = harness.service.fleet.require_served()
    return make_resume_token(b"a-secret-of-the-tests", "tenant", body.request_id, body.sampling.seed, served.identity)
