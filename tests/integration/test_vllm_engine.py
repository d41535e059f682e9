"""vLLM's gRPC on the coordinator's port, by the stubs of the routers' package: the tokens of Generate, keys, limits."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto import vllm_engine_pb2_grpc as smg_grpc
from smg_grpc_proto.generated import common_pb2 as smg_common
from tokenizers import Tokenizer

from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import InvalidRequest, NoTarget, Overloaded, from_rpc_error
from tests.support.scripted.model import EOS, identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, collect, running
from tests.support.services.faults import eventually
from tests.support.services.key_files import hash_key

PROMPT = (5, 6, 7)
KEY = "sk-" + "6" * 43
SAMPLING = {"seed": 11, "max_tokens": 20}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "depth": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "depth"],
    "additionalProperties": False,
}


def stub_of(harness: Harness) -> Any:
    return smg_grpc.VllmEngineStub(harness.channel)


def asked(request_id: str = "", *, stream: bool = False, **sampling: Any) -> smg.GenerateRequest:
    """A request as a router builds it."""
    return smg.GenerateRequest(
        request_id=request_id,
        tokenized=smg.TokenizedInput(input_ids=PROMPT, original_text="ignored"),
        sampling_params=smg.SamplingParams(**{**SAMPLING, **sampling}),
        stream=stream,
    )


def own(prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> api.GenerateRequest:
    """The same request in our own protocol."""
    body = api.GenerateRequest(sampling=api.SamplingParams(**{**SAMPLING, **sampling}))
    body.prompt_token_ids.token_ids.extend(prompt)
    return body


async def ends(call: Any) -> tuple[list[smg.GenerateStreamChunk], list[smg.GenerateComplete]]:
    """Chunks and ends of a call."""
    parts = [part async for part in call]
    chunks = [part.chunk for part in parts if part.HasField("chunk")]
    assert [part.WhichOneof("response") for part in parts[: len(chunks)]] == ["chunk"] * len(chunks)
    return chunks, [part.complete for part in parts[len(chunks) :]]


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code()


async def test_whole_and_streamed_answers_have_the_tokens_of_generate() -> None:
    async with running([ScriptedTarget()]) as harness:
        told = await collect(harness.stub.Generate(own(temperature=0.7, logprobs=2, prompt_logprobs=1)))
        sampling = {"temperature": 0.7, "logprobs": 2, "prompt_logprobs": 1}
        chunks, [whole] = await ends(stub_of(harness).Generate(asked(**sampling)))
        assert not chunks
        assert list(whole.output_ids) == told.ids()
        assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", 3, 20)
        chunks, [end] = await ends(stub_of(harness).Generate(asked(stream=True, **sampling)))
        assert len(chunks) > 2
        assert [token for chunk in chunks for token in chunk.token_ids] == told.ids()
        assert (end.finish_reason, end.completion_tokens, list(end.output_ids)) == ("length", 20, [])
        for found in (whole.output_logprobs, *(chunk.output_logprobs for chunk in chunks[:1])):
            first = told.tokens[0][0].logprobs
            assert found.token_logprobs[0] == first.logprob
            assert list(found.top_logprobs[0].token_ids) == [one.token_id for one in first.top]
        assert told.prompt_logprobs is not None
        values = [one.logprob for one in told.prompt_logprobs.positions]
        for prompt in (whole.input_logprobs, chunks[0].input_logprobs):
            assert list(prompt.token_ids) == list(PROMPT)
            assert [one.value for one in prompt.token_logprobs[1:]] == values


async def test_choices_are_told_apart() -> None:
    async with running([ScriptedTarget()]) as harness:
        told = await collect(harness.stub.Generate(own(n=2)))
        _, found = await ends(stub_of(harness).Generate(asked(n=2)))
        assert [(one.index, list(one.output_ids)) for one in found] == [(0, told.ids(0)), (1, told.ids(1))]


async def test_stop_ids_stop_strings_and_ends_of_sequence_are_told_as_vllm_does() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        told = await collect(harness.stub.Generate(own()))
        ids, text = told.ids(), told.texts[0]
        _, [end] = await ends(stub_of(harness).Generate(asked(stop_token_ids=[ids[4]])))
        assert list(end.output_ids) == ids[: ids.index(ids[4]) + 1]
        assert (end.finish_reason, end.matched_token_id) == ("stop", ids[4])
        stop = text[3:5]
        stopped = await collect(harness.stub.Generate(own(stop=[stop])))
        _, [end] = await ends(stub_of(harness).Generate(asked(stop=[stop], skip_special_tokens=True)))
        assert list(end.output_ids) == stopped.ids()
        assert (end.finish_reason, end.matched_stop_str) == ("stop", stop)
        target.end_after[0] = 6
        _, [end] = await ends(stub_of(harness).Generate(asked()))
        assert end.output_ids[-1] == EOS
        assert (end.finish_reason, end.WhichOneof("matched_stop")) == ("stop", None)


async def test_an_abort_and_a_caller_that_leaves_end_their_requests() -> None:
    target = ScriptedTarget()
    target.limit = 3
    async with running([target]) as harness:

        async def running_are(count: int) -> bool:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            return status.num_running == count

        calls = [stub_of(harness).Generate(asked(name, stream=True, max_tokens=500)) for name in "abc"]
        await eventually(lambda: running_are(3), "three requests run")
        loads = await stub_of(harness).GetLoads(smg.GetLoadsRequest(include=["core"]))
        assert (loads.dp_rank_count, loads.loads[0].num_running_reqs, loads.loads[0].num_total_reqs) == (1, 3, 3)
        assert (await stub_of(harness).GetServerInfo(smg.GetServerInfoRequest())).active_requests == 3
        await stub_of(harness).Abort(smg.AbortRequest(request_ids=["a", "b", "unknown"]))
        for call in calls[:2]:
            _, [end] = await ends(call)
            assert end.finish_reason == "abort"
        calls[2].cancel()
        await eventually(lambda: running_are(0), "no request runs")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(harness).Abort(smg.AbortRequest(request_ids=["x"] * 257))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_learns_model_server_and_tokenizer() -> None:
    served = identity(eos_token_ids=[EOS], sampling_defaults=pb.SamplingDefaults(temperature=0.6, top_k=20))
    target = ScriptedTarget(served)
    target.tokenizer_config = json.dumps({"pad_token": "<|pad|>", "chat_template": "{{ messages }}"})
    async with running([target], max_running=7) as harness:
        stub = stub_of(harness)
        assert (await stub.HealthCheck(smg.HealthCheckRequest())).healthy
        model = await stub.GetModelInfo(smg.GetModelInfoRequest())
        assert (model.served_model_name, model.is_generation) == (served.name, True)
        assert (model.max_context_length, model.vocab_size) == (served.max_model_len, served.vocab_size)
        assert (list(model.eos_token_ids), model.pad_token_id) == ([EOS], 2)
        assert json.loads(model.default_sampling_params_json) == {"temperature": 0.6, "top_k": 20}
        server = await stub.GetServerInfo(smg.GetServerInfoRequest())
        assert (server.max_num_seqs, server.data_parallel_size) == (7, 1)
        archives = [[piece async for piece in stub.GetTokenizer(smg_common.GetTokenizerRequest())] for _ in range(2)]
        assert archives[0] == archives[1]
        data = b"".join(piece.data for piece in archives[0])
        assert [bool(piece.sha256) for piece in archives[0]] == [False] * (len(archives[0]) - 1) + [True]
        assert archives[0][-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as files:
            tokenizer = Tokenizer.from_buffer(files.read("tokenizer.json"))
            assert json.loads(files.read("tokenizer_config.json")) == json.loads(target.tokenizer_config)
            assert json.loads(files.read("generation_config.json")) == {"eos_token_id": [EOS]}
        told = await collect(harness.stub.Generate(own()))
        assert tokenizer.decode(told.ids()) == told.texts[0]


async def test_a_target_that_fails_while_its_tokenizer_is_asked_for_is_asked_again() -> None:
    class Failing(ScriptedTarget):
        num_failures = 0
        num_asked = 0

        async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[pb.GetTokenizerResponse]:
            self.num_asked += 1
            async for part in super().GetTokenizer(request, context):
                if self.num_failures:
                    self.num_failures -= 1
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                yield part

    target = Failing()
    async with running([target]) as harness:
        await harness.all_ready()

        async def archive() -> bytes:
            pieces = stub_of(harness).GetTokenizer(smg_common.GetTokenizerRequest())
            return b"".join([piece.data async for piece in pieces])

        target.num_failures, num_before = 1, target.num_asked
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await archive()
        error = from_rpc_error(caught.value)
        assert isinstance(error, NoTarget)
        assert "retry" in error.message
        first = await archive()
        assert zipfile.ZipFile(io.BytesIO(first)).read("tokenizer.json") == target.tokenizer_json
        assert await archive() == first
        assert target.num_asked - num_before == 2


async def test_what_is_not_served_and_bad_values_are_typed_errors() -> None:
    async with running([ScriptedTarget()]) as harness:
        stub = stub_of(harness)
        for changes, field in (
            ({"temperature": -1.0}, "sampling.temperature"),
            ({"logprobs": -1}, "sampling_params.logprobs"),
            ({"top_p": 2.0}, "sampling.top_p"),
            ({"stop_token_ids": [2**32 - 1]}, "sampling.stop_token_ids"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ends(stub.Generate(asked(**changes)))
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidRequest)
            assert error.field.startswith(field)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(smg.EmbedRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(stub.SubscribeKvEvents(smg_common.SubscribeKvEventsRequest())) is (
            grpc.StatusCode.UNIMPLEMENTED
        )


async def test_health_needs_no_key_and_everything_else_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"id": "k", "tenant": "ours", "sha256": hash_key(KEY)}]}))
    async with running([ScriptedTarget()], api_keys_file=keys) as harness:
        stub, key = stub_of(harness), (("authorization", f"Bearer {KEY}"),)
        assert (await stub.HealthCheck(smg.HealthCheckRequest())).healthy
        for ask in (
            lambda **more: stub.Generate(asked(), **more),
            lambda **more: stub.GetTokenizer(smg_common.GetTokenizerRequest(), **more),
        ):
            assert await code_of(ask()) is grpc.StatusCode.UNAUTHENTICATED
            assert [part async for part in ask(metadata=key)]
        for call in (
            lambda **more: stub.GetModelInfo(smg.GetModelInfoRequest(), **more),
            lambda **more: stub.GetServerInfo(smg.GetServerInfoRequest(), **more),
            lambda **more: stub.GetLoads(smg.GetLoadsRequest(), **more),
            lambda **more: stub.Abort(smg.AbortRequest(request_ids=["a"]), **more),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await call(metadata=key)


async def test_a_quota_refuses_with_a_delay() -> None:
    async with running([ScriptedTarget()], quota_tokens_per_s=0.001, quota_burst_tokens=5) as harness:
        await ends(stub_of(harness).Generate(asked(max_tokens=5)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ends(stub_of(harness).Generate(asked()))
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s


async def test_a_whole_answer_takes_room_of_the_tenants_budget_and_a_streamed_one_none() -> None:
    async with running(
        [ScriptedTarget()], max_held_prompt_bytes=8000, max_held_prompt_bytes_per_tenant=2000
    ) as harness:
        stub = stub_of(harness)
        long = {"max_tokens": 200, "ignore_eos": True}
        chunks, _ = await ends(stub.Generate(asked(stream=True, **long)))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ends(stub.Generate(asked(**long)))
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded)
        assert error.reason == "PROMPT_BYTES_EXCEEDED"
        await ends(stub.Generate(asked()))  # all of it was given back


@pytest.mark.integration
async def test_real_models_answer_with_equal_tokens_and_guided_json(shipped_cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(shipped_cluster.address) as channel:
        own_stub, stub = api_grpc.CoordinatorServiceStub(channel), smg_grpc.VllmEngineStub(channel)
        prompt = (await own_stub.Tokenize(api.TokenizeRequest(text="def colour():"))).token_ids
        for kind, given in (
            ({}, {"temperature": 0.0}),
            ({}, {"temperature": 0.7, "top_p": 0.95}),
            ({"json_schema": json.dumps(SCHEMA)}, {"temperature": 0.7}),
        ):
            sampling = {"seed": 4, "max_tokens": 60, **given}
            body = own(tuple(prompt), **sampling, top_k=0, constraint=pb.Constraint(**kind) if kind else None)
            told = await collect(own_stub.Generate(body))
            request = smg.GenerateRequest(sampling_params=smg.SamplingParams(**sampling, **kind), stream=True)
            request.tokenized.input_ids.extend(prompt)
            chunks, [end] = await ends(stub.Generate(request))
            assert [token for chunk in chunks for token in chunk.token_ids] == told.ids()
            assert end.spec_draft_tokens >= end.spec_accepted_tokens > 0
            if kind:
                found = json.loads(told.texts[0])
                assert found["colour"] in ("red", "green")
                assert 0 <= found["depth"] <= 99
