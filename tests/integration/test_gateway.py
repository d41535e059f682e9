"""A gateway between HTTP clients and coordinators: equal output, streams that end well, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.gateway.api.answers import ModelList, TextCompletion
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.shared_redis import coordinators
from tests.support.services.coordinator_harness import Harness, collect, expected_ids, request, running
from tests.support.services.faults import eventually
from tests.support.services.gateways import gateway, post, raw_request
from tests.support.services.key_files import hash_key

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(120)]
PROMPT = [5, 6, 7]


async def is_idle(harness: Harness) -> None:
    """Wait until no request runs at a coordinator."""

    async def idle() -> bool:
        return harness.metric("requests_running") == 0

    await eventually(idle, "no request runs")


async def read_ids(stream: Any) -> list[int]:
    return [token for event in [event async for event in stream] for c in event.choices for token in c.token_ids]


async def test_http_gives_the_tokens_and_the_text_of_grpc() -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.openai() as client:
        direct = await collect(harness.stub.Generate(request(max_tokens=40, n=2, temperature=0.8)))
        fields = {"prompt": PROMPT, "model": "scripted", "seed": 11, "max_tokens": 40, "n": 2, "temperature": 0.8}
        extra = {"return_token_ids": True}
        whole = await client.completions.create(**fields, extra_body=extra)
        texts, ids = ["", ""], [[], []]  # type: ignore[var-annotated]
        async for event in await client.completions.create(**fields, extra_body=extra, stream=True):
            for choice in event.choices:
                texts[choice.index] += choice.text
                ids[choice.index] += choice.token_ids
    for index in range(2):
        assert whole.choices[index].text == texts[index] == direct.texts[index]
        assert whole.choices[index].token_ids == ids[index] == direct.ids(index)
    assert direct.started is not None
    assert whole.system_fingerprint == direct.started.model.numerics_id
    assert whole.usage is not None and whole.usage.completion_tokens == sum(map(len, ids))


async def test_a_prompt_is_scored_as_lm_eval_asks_for_it() -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        prompts = [[5, 6, 7, 8], [9, 10]]
        body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
        answer = (await client.post("/v1/completions", json={**body, "model": "scripted"})).json()
        too_long = {**body, "prompt": [5] * 100_000}
        refused = (await client.post("/v1/completions", json=too_long)).json()
    assert refused["error"]["param"] == "prompt"
    TextCompletion.model_validate(answer)
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(told["tokens"]) == len(prompt) + 1
        assert told["token_logprobs"][0] is None
        assert all(isinstance(value, float) for value in told["token_logprobs"][1:])


async def test_a_client_that_leaves_frees_what_it_held() -> None:
    target = ScriptedTarget()
    target.limit = 5
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100, "stream": True}).encode()
    whole = json.dumps({"prompt": PROMPT, "max_tokens": 100}).encode()
    async with running([target]) as harness, gateway(harness.address) as one:
        reader, writer = await raw_request(one, post("/v1/completions", body))
        await reader.readuntil(b"data: ")
        _, other = await raw_request(one, post("/v1/completions", whole))

        async def both_run() -> bool:
            return harness.metric("requests_running") == 2

        await eventually(both_run, "both run")
        writer.close()
        other.close()
        await is_idle(harness)

        async def counted() -> bool:
            return one.parts.registry.get_sample_value("specdec_gateway_clients_gone_total") == 2

        await eventually(counted, "both are counted")


async def test_a_slow_reader_holds_back_only_its_own_stream() -> None:
    target = ScriptedTarget()
    fields = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "seed": 11, "ignore_eos": True}
    body = json.dumps({**fields, "return_token_ids": True, "return_token_origins": True}).encode()
    async with running([target], credit_window_tokens=16) as harness, gateway(harness.address) as one:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", one.port))
        slow.sendall(post("/v1/completions", body))
        async with one.http() as client:
            quick = await client.post("/v1/completions", json={**fields, "max_tokens": 50, "stream": False})
        assert quick.status_code == 200
        slow.setblocking(False)
        data, loop = b"", asyncio.get_running_loop()
        while b"[DONE]" not in data[-100:]:
            data += await loop.sock_recv(slow, 65536)
        slow.close()
    parts = [part.split(b"\n")[0] for part in data.split(b"data: ")[1:]]
    events = [json.loads(part) for part in parts if part.startswith(b"{")]
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert ids == expected_ids(target, 400)


async def test_a_coordinator_that_dies_in_mid_stream_is_invisible(redis_server: RedisServer) -> None:
    target = ScriptedTarget()
    target.limit = 20
    async with coordinators(target, redis_server) as (one, two), gateway(one.address, two.address) as front:
        async with front.openai() as client:
            fields = {"prompt": PROMPT, "model": "scripted", "max_tokens": 60, "seed": 11, "stream": True}
            stream = await client.completions.create(**fields, extra_body={"return_token_ids": True})
            ids: list[int] = []
            async for event in stream:
                ids += [token for choice in event.choices for token in choice.token_ids]
                if len(ids) == 20 and target.limit is not None:
                    runs = one if one.metric("requests_running") else two
                    await runs.server.stop(0)
                    target.set_limit(None)
        assert front.parts.registry.get_sample_value("specdec_gateway_failovers_total") >= 1
    assert ids == expected_ids(target, 60)


async def test_a_coordinator_that_is_not_there_is_passed_over() -> None:
    async with (
        running([ScriptedTarget()]) as harness,
        gateway("127.0.0.1:1", harness.address) as one,
        one.http() as client,
    ):
        for _ in range(3):
            assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_without_any_coordinator_clients_are_told_to_come_again() -> None:
    async with gateway("127.0.0.1:1") as one, one.http() as client:
        assert (await client.get("/health")).status_code == 503
        answer = await client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/version")).status_code == 200


async def test_keys_are_decided_by_the_coordinator_in_openais_words(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"id": "k", "tenant": "me", "sha256": hash_key("my-key")}]}))
    async with running([ScriptedTarget()], api_keys_file=keys) as harness, gateway(harness.address) as one:
        async with one.openai("wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
        assert caught.value.code == "invalid_api_key"
        async with one.openai("my-key") as client:
            assert [model.id async for model in client.models.list()] == ["scripted"]


async def test_too_many_requests_are_refused_with_a_time_to_come_again() -> None:
    target = ScriptedTarget()
    target.limit = 3
    async with (
        running([target], max_running=1, max_waiting=0) as harness,
        gateway(harness.address) as one,
        one.openai() as client,
    ):
        fields: dict[str, Any] = {"prompt": PROMPT, "model": "scripted", "max_tokens": 9}
        stream = await client.completions.create(**fields, stream=True)
        await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**fields)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        await stream.close()


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"path": "/v1/completions", "content": b'{"prompt": "x"'}, 400, "invalid_json"),
        ({"path": "/v1/completions", "content": b"\xff"}, 400, "invalid_json"),
        ({"path": "/v1/completions", "content": b"x" * 3000}, 413, "request_too_large"),
        ({"path": "/v1/completions", "content": b"{}", "type": "text/plain"}, 415, "unsupported_media_type"),
        ({"path": "/v1/completions", "content": b'{"prompt": "x", "model": "no"}'}, 404, "model_not_found"),
        ({"path": "/v1/completions", "content": b'{"prompt": [400]}'}, 400, "invalid_value"),
        (
            {"path": "/v1/chat/completions", "content": b'{"messages": [{"role": "user", "content": "x"}]}'},
            400,
            "invalid_value",
        ),
        ({"path": "/v1/completions", "content": b'{"prompt": "x", "stream_options": {}}'}, 400, "invalid_value"),
        ({"path": "/v1/nothing", "content": b"{}"}, 404, "unknown_url"),
        ({"path": "/v1/models", "content": b"{}"}, 405, "method_not_allowed"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_every_refusal_has_openais_form(sent: dict[str, Any], status: int, code: str) -> None:
    async with (
        running([ScriptedTarget()]) as harness,
        gateway(harness.address, max_body_bytes=2048) as one,
        one.http() as client,
    ):
        headers = {"content-type": sent.get("type", "application/json"), "x-request-id": "mine"}
        answer = await client.post(sent["path"], content=sent["content"], headers=headers)
    assert answer.status_code == status
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code


async def test_clients_that_send_too_slowly_are_cut_off() -> None:
    async with (
        running([ScriptedTarget()]) as harness,
        gateway(harness.address, header_read_s=1.0, body_read_s=0.2) as hasty,
        gateway(harness.address) as one,
    ):
        reader, _ = await raw_request(hasty, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        assert await reader.read() == b""
        reader, _ = await raw_request(hasty, post("/v1/completions", b"{" + b" " * 100)[:-50])
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        reader, _ = await raw_request(one, b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        reader, _ = await raw_request(one, b"nonsense\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")


async def test_pipelined_requests_of_a_client_that_leaves_disturb_nobody() -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 500, "stream": True}).encode()
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        _, writer = await raw_request(one, post("/v1/completions", body) * 5)
        writer.close()
        assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200
        await is_idle(harness)


async def test_a_drain_lets_streams_end_and_refuses_what_is_new() -> None:
    target = ScriptedTarget()
    target.limit = 5
    async with running([target]) as harness, gateway(harness.address) as one, one.openai() as client:
        fields: dict[str, Any] = {"prompt": PROMPT, "model": "scripted", "max_tokens": 30, "seed": 11}
        stream = await client.completions.create(**fields, stream=True, extra_body={"return_token_ids": True})
        first = await anext(aiter(stream))
        draining = asyncio.create_task(one.drain(60.0))
        await asyncio.sleep(0)
        async with one.http() as other:
            assert (await other.get("/health")).status_code == 503
            refused = await other.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        target.set_limit(None)
        ids = [*first.choices[0].token_ids, *await read_ids(stream)]
        await draining
    assert ids == expected_ids(target, 30)


async def test_streams_that_a_drain_cuts_off_end_in_an_error_event() -> None:
    target = ScriptedTarget()
    target.limit = 5
    async with running([target]) as harness, gateway(harness.address) as one, one.openai() as client:
        stream = await client.completions.create(prompt=PROMPT, model="scripted", max_tokens=30, stream=True)
        events = aiter(stream)
        await anext(events)
        await one.drain(0.0)
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in events:
                pass
        await is_idle(harness)


async def test_an_abort_ends_a_stream_with_its_reason() -> None:
    target = ScriptedTarget()
    target.limit = 5
    async with running([target]) as harness, gateway(harness.address) as one, one.openai() as client:
        stream = await client.completions.create(
            prompt=PROMPT, model="scripted", max_tokens=30, stream=True, extra_body={"request_id": "mine"}
        )
        events = aiter(stream)
        await anext(events)
        await harness.stub.Abort(api.AbortRequest(request_id="mine"))
        assert [event async for event in events][-1].choices[0].finish_reason == "abort"


async def test_models_and_the_tokenizer_are_told() -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        models = (await client.get("/v1/models")).json()
        ModelList.model_validate(models)
        assert (await client.get("/v1/models/scripted")).json() == models["data"][0]
        missing = await client.get("/v1/models/no/such")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
        tokens = (await client.post("/tokenize", json={"prompt": "the fox", "return_token_strs": True})).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "the fox"}
        both = await client.post("/tokenize", json={"prompt": "x", "messages": [{"role": "user", "content": "x"}]})
        assert both.status_code == 400
        assert (await client.get("/tokenizer_info")).json()["vocab_size"] > 0


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox"}]}
OWN = {"chat_template": "{% for d in documents %}{{ d.text }}{% endfor %} {{ messages[0].content }}"}


@pytest.mark.parametrize("has_template", [True, False])
async def test_a_request_brings_its_template_and_documents_where_that_is_trusted(has_template: bool) -> None:
    target = ScriptedTarget()
    if has_template:
        target.tokenizer_config = json.dumps({"chat_template": "{{ documents }}"})
    asked = {**CHAT, **OWN, "documents": [{"text": "quick"}, {"text": "brown"}]}
    async with (
        running([target], trust_request_chat_template=True) as harness,
        gateway(harness.address) as one,
        one.http() as client,
    ):
        tokens = (await client.post("/tokenize", json=asked)).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "quickbrown the fox"}
        fields = {**asked, "max_tokens": 3, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=fields)).json()
        assert answer["prompt_token_ids"] == tokens
        for path in ("/tokenize", "/v1/chat/completions"):
            for bad, param in (
                ({"chat_template": "{% if %}"}, "chat_template"),
                ({"chat_template": "x" * 70_000}, "chat_template"),
                ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
                ({"documents": ["x"]}, "documents[0]"),
            ):
                refused = await client.post(path, json={**asked, **bad})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_template_of_a_request_is_refused_unless_the_operator_trusts_them() -> None:
    target = ScriptedTarget()
    target.tokenizer_config = json.dumps({"chat_template": "{{ documents }}"})
    async with running([target]) as harness, gateway(harness.address) as one, one.http() as client:
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = await client.post(path, json={**CHAT, **OWN})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "chat_template")
            assert "trust_request_chat_template" in error["message"]
        told = await client.post("/tokenize", json={**CHAT, "documents": []})
        assert (await client.post("/detokenize", json={"tokens": told.json()["tokens"]})).json() == {"prompt": "[]"}


async def test_coordinators_that_render_conversations_differently_are_told_once() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for number, target in enumerate(targets):
        target.tokenizer_config = json.dumps({"chat_template": f"{number}{{{{ messages[0].content }}}}"})
    with capture_logs() as logs:
        async with (
            running(targets[:1]) as first,
            running(targets[1:], owner_id="coordinator-2") as second,
            gateway(first.address, second.address) as one,
            one.http() as client,
        ):
            for number in range(12):  # other chats, so that each coordinator gets some
                chat = {**CHAT, "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 2}
                assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    (told,) = [line for line in logs if line["event"] == "chat_templates_differ"]
    assert sorted(told["coordinators"].values()) == sorted([first.address, second.address])


async def test_figures_count_what_speculation_did_under_vllms_names() -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
        page = (await client.get("/metrics")).text
    assert "\nvllm:spec_decode_num_drafts_total " in page
    assert "\nspecdec_gateway_output_tokens_total 4.0\n" in page
    assert 'specdec_gateway_requests_total{route="/v1/completions",status="200"} 1.0' in page


async def test_probes_and_scrapers_have_ports_of_their_own() -> None:
    async with (
        gateway("127.0.0.1:1", metrics_port=0, health_port=0, public_metrics=False) as one,
        one.http() as client,
        httpx2.AsyncClient() as prober,
    ):
        metrics, health = (f"http://127.0.0.1:{port}" for port in (one.metrics_port, one.health_port))
        assert (await client.get("/metrics")).status_code == 404
        assert "/metrics" not in (await client.get("/openapi.json")).json()["paths"]
        assert "specdec_gateway_requests_running" in (await prober.get(f"{metrics}/metrics")).text
        assert (await prober.get(f"{health}/version")).status_code == 200
        assert (await prober.get(f"{health}/health")).status_code == 503
        for path in ("/metrics", "/v1/models", "/openapi.json", "/docs"):
            assert (await prober.get(f"{health}{path}")).status_code == 404
        asked = ["health", "--address", f"http://127.0.0.1:{one.health_port}"]
        done = await asyncio.to_thread(CliRunner().invoke, app, asked)
        assert (done.exit_code, "NOT_SERVING (503)" in done.stdout) == (1, True)
    done = await asyncio.to_thread(CliRunner().invoke, app, asked)
    assert (done.exit_code, "UNAVAILABLE" in done.stderr) == (6, True)
