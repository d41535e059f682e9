"""The Open Inference Protocol on the coordinator's port: the tokens of Generate, its keys, limits and cancellation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.coordinator import service
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip
from specdec.v1 import open_inference_pb2_grpc as oip_grpc
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, collect, running
from tests.support.services.faults import eventually
from tests.support.services.key_files import hash_key

PROMPT = (5, 6, 7)
KEY = "sk-" + "5" * 43


def stub_of(harness: Harness) -> Any:
    return oip_grpc.GRPCInferenceServiceStub(harness.channel)


def infer(
    target: ScriptedTarget, request_id: str = "r", *, stream: bool = False, **params: Any
) -> oip.ModelInferRequest:
    """A request by token ids for all outputs."""
    request = oip.ModelInferRequest(model_name=target.identity.name, id=request_id)
    ids = request.inputs.add(name="input_ids", datatype="INT32", shape=[len(PROMPT)])
    ids.contents.int_contents.extend(PROMPT)
    for name, value in (("stream", stream), ("exclude_input_in_output", True)):
        request.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(value)
    text = json.dumps({"seed": 11, "max_tokens": 20, **params}).encode()
    request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    for name in ("text_output", "output_ids", "finish_reason"):
        request.outputs.add(name=name)
    return request


def read(response: oip.ModelInferResponse) -> tuple[str, list[int], str]:
    text, ids, reason = response.raw_output_contents
    numbers = [int.from_bytes(ids[start : start + 8], "little") for start in range(0, len(ids), 8)]
    return text[4:].decode(), numbers, reason[4:].decode()


async def told_by_generate(harness: Harness) -> tuple[str, list[int]]:
    body = api.GenerateRequest(sampling=api.SamplingParams(seed=11, max_tokens=20))
    body.prompt_token_ids.token_ids.extend(PROMPT)
    told = await collect(harness.stub.Generate(body))
    return told.texts[0], told.ids()


async def test_one_response_and_a_stream_have_the_tokens_of_generate() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        text, ids = await told_by_generate(harness)
        whole = await stub_of(harness).ModelInfer(infer(target))
        assert read(whole) == (text, ids, "length")
        assert (whole.id, whole.model_name, whole.model_version) == ("r", target.identity.name, "1")
        call = stub_of(harness).ModelStreamInfer()
        await call.write(infer(target, "s", stream=True))
        await call.done_writing()
        parts = [part.infer_response async for part in call]
        assert len(parts) > 2
        assert [part.parameters["triton_final_response"].bool_param for part in parts] == [False] * (len(parts) - 1) + [
            True
        ]
        read_parts = [read(part) for part in parts]
        assert "".join(part[0] for part in read_parts) == text
        assert [token for part in read_parts for token in part[1]] == ids
        assert read_parts[-1][2] == "length"


async def test_requests_of_one_stream_run_at_once_and_errors_end_only_their_own() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        text, _ = await told_by_generate(harness)
        call = stub_of(harness).ModelStreamInfer()
        wrong = infer(target, "wrong", temperature=-1)
        for request in (infer(target, "a", stream=True), wrong, infer(target, "b", stream=False)):
            await call.write(request)
        await call.done_writing()
        texts: dict[str, str] = {}
        async for part in call:
            one = part.infer_response.id
            if part.error_message:
                assert (one, part.error_message.partition(":")[0]) == ("wrong", "INVALID_ARGUMENT")
                assert "sampling.temperature" in part.error_message
            else:
                texts[one] = texts.get(one, "") + read(part.infer_response)[0]
        assert texts == {"a": text, "b": text}


async def test_a_caller_that_leaves_ends_its_requests() -> None:
    target = ScriptedTarget()
    target.limit = 3
    async with running([target]) as harness:
        call = stub_of(harness).ModelStreamInfer()
        for name in ("a", "b"):
            await call.write(infer(target, name, stream=True, max_tokens=500))

        async def both_run() -> bool:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            return status.num_running == 2

        async def none_runs() -> bool:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            return status.num_running == 0

        await eventually(both_run, "both requests run")
        call.cancel()
        await eventually(none_runs, "no request runs")


async def test_health_needs_no_key_and_everything_else_does(tmp_path: Path) -> None:
    target = ScriptedTarget()
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"id": "k", "tenant": "ours", "sha256": hash_key(KEY)}]}))
    async with running([target], api_keys_file=keys) as harness:
        stub = stub_of(harness)
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
        name = target.identity.name
        for ask in (
            lambda **more: stub.ModelInfer(infer(target), **more),
            lambda **more: stub.ModelMetadata(oip.ModelMetadataRequest(name=name), **more),
            lambda **more: stub.ModelReady(oip.ModelReadyRequest(name=name), **more),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await ask(metadata=(("authorization", f"Bearer {KEY}"),))


async def test_models_are_told_by_name_and_version() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        stub, name = stub_of(harness), target.identity.name
        ready = [
            (await stub.ModelReady(oip.ModelReadyRequest(name=model, version=version))).ready
            for model, version in ((name, ""), (name, "1"), (name, "2"), ("other", ""))
        ]
        assert ready == [True, True, False, False]
        metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name=name))
        assert {"text_input", "sampling_parameters"} <= {one.name for one in metadata.inputs}
        assert metadata.outputs[0].name == "text_output"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(oip.ModelInferRequest(model_name="other", inputs=infer(target).inputs))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_whole_answer_takes_room_of_the_tenants_budget_and_a_streamed_one_none() -> None:
    target = ScriptedTarget()
    async with running([target], max_held_prompt_bytes=8000, max_held_prompt_bytes_per_tenant=2000) as harness:
        long = {"max_tokens": 200, "ignore_eos": True}
        for is_streamed in (True, False):
            call = stub_of(harness).ModelStreamInfer()
            await call.write(infer(target, stream=is_streamed, **long))
            await call.done_writing()
            *_, last = [part async for part in call]
            assert (
                "PROMPT_BYTES" in last.error_message or "bytes of the tenant's" in last.error_message
            ) != is_streamed
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(harness).ModelInfer(infer(target, **long))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub_of(harness).ModelInfer(infer(target))  # all of it was given back


async def test_streams_that_wait_for_a_later_message_are_ended_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = ScriptedTarget()
    shortages: list[bool] = []
    monkeypatch.setattr(service, "is_short", lambda: bool(shortages))
    async with running([target], max_held_prompt_bytes=2**20, max_message_bytes=2**20) as harness:
        calls = [stub_of(harness).ModelStreamInfer() for _ in range(6)]
        for call in calls:
            await call.write(infer(target, max_tokens=1))
            assert (await call.read()).infer_response.id == "r"
        shortages.append(True)
        codes = [await asyncio.wait_for(call.code(), 10) for call in calls[4:]]
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        await calls[0].write(infer(target, "later", max_tokens=1))
        assert (await calls[0].read()).infer_response.id == "later"


async def test_a_stream_on_which_nothing_comes_is_ended() -> None:
    target = ScriptedTarget()
    async with running([target], request_read_s=1.0) as harness:
        call = stub_of(harness).ModelStreamInfer()
        async with asyncio.timeout(20):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
