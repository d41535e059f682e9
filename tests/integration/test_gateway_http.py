"""What browsers, probes and old proxies ask of a gateway."""

from __future__ import annotations

import gzip
import json

import pytest
from pydantic import ValidationError

from specdec.gateway.settings import GatewaySettings
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import running
from tests.support.services.gateways import gateway, raw_request

pytestmark = pytest.mark.timeout(120)
APP = "https://app.example.com"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def test_pages_of_the_named_origins_may_call_and_others_may_not() -> None:
    async with (
        running([ScriptedTarget()]) as harness,
        gateway(harness.address, cors_origins=f"http://localhost:3000, {APP}", max_concurrent_requests=1) as one,
        one.http() as client,
    ):
        allowed = await client.options("/v1/chat/completions", headers={"origin": APP, **ASKS})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == APP
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        other = await client.options("/v1/chat/completions", headers={"origin": "https://evil.example", **ASKS})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        body = {"prompt": [5], "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body, headers={"origin": APP})
        assert answer.headers["access-control-allow-origin"] == APP
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await client.post("/v1/completions", json={}, headers={"origin": APP})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, APP)
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 4000}):
            full = await client.post("/v1/completions", json=body, headers={"origin": APP})
            assert (full.status_code, full.headers["access-control-allow-origin"]) == (429, APP)


async def test_without_the_setting_no_page_of_another_origin_may_call() -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        preflight = await client.options("/v1/chat/completions", headers={"origin": APP, **ASKS})
        assert preflight.status_code == 204
        assert preflight.headers["allow"] == "POST, OPTIONS"
        answer = await client.post("/v1/completions", json={"prompt": [5]}, headers={"origin": APP})
        assert not [name for name in (*preflight.headers, *answer.headers) if name.startswith("access-control")]
        assert (await client.options("/nothing")).status_code == 404


@pytest.mark.parametrize("origins", ["app.example.com", "https://a.example/path", "https://a b"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ValidationError, match="is no origin"):
        GatewaySettings(coordinators=("h:1",), cors_origins=origins)  # type: ignore[arg-type]


async def test_head_is_answered_where_get_is_and_without_a_body() -> None:
    async with (
        running([ScriptedTarget()]) as harness,
        gateway(harness.address, health_port=0) as one,
        one.http() as client,
    ):
        for path in (
            "/health",
            "/ping",
            "/version",
            "/v1/models",
            "/v1/models/scripted",
            "/metrics",
            "/",
            "/openapi.json",
        ):
            head, got = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers.get("content-type") == got.headers.get("content-type")
        assert (await client.head("/v1/models/no")).status_code == 404
        assert (await client.head("/v1/completions")).status_code == 405
        probes = f"http://127.0.0.1:{one.health_port}"
        assert (await client.head(f"{probes}/version")).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_page_sends_nothing_without_asking_first(kind: str | None) -> None:
    body = json.dumps({"prompt": [5], "max_tokens": 2})
    kinds = {} if kind is None else {"content-type": kind}  # browsers ask first (CORS) for all others
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        for path in ("/v1/completions", "/tokenize", "/v1/messages", "/v1/responses"):
            answer = await client.post(path, content=body.encode(), headers={"origin": APP, **kinds})
            assert answer.status_code == 415, path


async def test_a_compressed_body_is_refused_by_the_name_of_its_header() -> None:
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        body = json.dumps({"prompt": [5], "max_tokens": 2}).encode()
        kinds = {"content-type": "application/json"}
        for encoding in ("gzip", "br", "deflate, gzip"):
            answer = await client.post(
                "/v1/completions", content=gzip.compress(body), headers={**kinds, "content-encoding": encoding}
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (415, "unsupported_media_type")
            assert "content-encoding" in error["message"]
        plain = await client.post("/v1/completions", content=body, headers={**kinds, "content-encoding": "identity"})
        assert plain.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection(stream: bool) -> None:
    body = json.dumps({"prompt": [5, 6], "max_tokens": 3, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one:
        reader, writer = await raw_request(one, head.encode() + body)
        answer = await reader.read()  # up to the end
        writer.close()
    headers, _, told = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in headers.lower()
    assert b"connection: close" in headers.lower()
    if stream:
        events = told.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
    else:
        assert json.loads(told)["object"] == "text_completion"


async def test_unknown_fields_are_named_in_the_answer_or_refused_as_the_operator_chooses() -> None:
    unknown = {"temprature": 1, "stream_options": {"a, b": 1}, "é\r\nx-evil: 1": 2}
    body = {"prompt": [5], "max_tokens": 2, **unknown}
    async with running([ScriptedTarget()]) as harness:
        async with gateway(harness.address) as one, one.http() as client:
            answer = await client.post("/v1/completions", json={**body, "stream": True})
            assert answer.status_code == 200
            told = "temprature, \\xe9??x-evil:?1, stream_options.a??b"
            assert answer.headers["specdec-ignored-fields"] == told
            plain = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2, "cache_prompt": True})
            assert "specdec-ignored-fields" not in plain.headers
            schema = (await client.get("/openapi.json")).json()["components"]["schemas"]["CompletionRequest"]
            assert "additionalProperties" not in schema
        async with gateway(harness.address, unknown_fields="refuse") as one, one.http() as client:
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_parameter")
            taken = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2.0, "cache_prompt": True})
            assert taken.status_code == 200
            schema = (await client.get("/openapi.json")).json()["components"]["schemas"]["CompletionRequest"]
            assert schema["additionalProperties"] is False


async def test_headers_that_are_passed_on_are_refused_by_name_or_left_out_where_they_are_too_long() -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1}
    async with running([ScriptedTarget()]) as harness, gateway(harness.address) as one, one.http() as client:
        for name in ("authorization", "x-api-key", "specdec-tenant"):
            answer = await client.post("/v1/completions", json=body, headers={name: "a" * 9000})
            assert (answer.status_code, answer.json()["error"]["param"]) == (431, name)
        trace = {"traceparent": "a" * 9000, "tracestate": "b" * 20_000}
        for headers in ({"authorization": "Bearer " + "a" * 6000}, trace):
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
