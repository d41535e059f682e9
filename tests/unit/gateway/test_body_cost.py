"""What a body may cost, whatever grows in it."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pydantic
import pytest

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES
from specdec.gateway.anthropic.request import CountTokensRequest, MessagesRequest
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.problems import validated
from specdec.gateway.api.responses import ResponsesRequest
from specdec.gateway.api.tokens import DetokenizeBody, TokenizeBody
from specdec.gateway.app import build_app
from specdec.gateway.chat import messages
from specdec.gateway.http import json_reader
from specdec.gateway.http.json_reader import MOST_FIELD_VALUES, MOST_FIELDS, MOST_VALUES, parsed
from specdec.gateway.service import Gateway
from specdec.gateway.settings import GatewaySettings
from specdec.gateway.translation import forced_calls
from specdec.gateway.translation.completion_request import completion_to_generate
from specdec.service.byte_budget import ByteBudget
from specdec.wire.errors import InvalidRequest, Unavailable
from specdec.wire.message_sizes import MOST_CONVERSATION_VALUES
from tests.support.cost import lines_run

SCALE = 256
"""A gateway's limits are so much smaller here than a deployment's: all that a body costs goes by them."""
GROWN_BYTES = 8 * 2**20 // SCALE
MOST_BYTES = 9 * GROWN_BYTES // 2
"""Of memory, over all that is done with a body: four times the largest one's, and what any takes."""
MOST_ANSWER_BYTES = 700
"""Of an error, which has the beginning of what was sent, as text of at most four bytes a character."""
MOST_ERRORS = 40
"""Of one value: as many as a union has members, each with its own."""
SMALL: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    TokenizeBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": [1]},
    MessagesRequest: {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
    CountTokensRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}
MODELS = {model.__name__: model for model in SMALL}
ITEMS = (b"1", b"-1", b'"a"', b"{}", b"[1]", b"1.5")


def grown(item: bytes, size: int) -> bytes:
    """A list of equal items."""
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def many_fields(size: int) -> bytes:
    return b"{" + b",".join(b'"f%d":1' % number for number in range(size // 10)) + b"}"


ROOM = GROWN_BYTES - 512
CALL = b'{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":{}}}]}'
TOOL = b'{"type":"function","function":{"name":"f"}}'
CONVERSATIONS = {
    "messages": b'{"messages":' + grown(b'{"role":"user","content":"a"}', ROOM) + b"}",
    "calls": b'{"messages":' + grown(CALL, ROOM) + b"}",
    "parts": b'{"messages":[{"role":"user","content":' + grown(b'{"type":"text","text":"a"}', ROOM - 80) + b"}]}",
    "parts that are texts": b'{"messages":[{"role":"user","content":' + grown(b'"a"', 4 * 700) + b"}]}",
    "parts of a prediction": b'{"messages":[{"role":"user","content":"a"}],"prediction":{"type":"content","content":'
    + grown(b'{"type":"text","text":"a"}', 240 * 27)
    + b"}}",
    "tools": b'{"messages":[{"role":"user","content":"a"}],"tools":' + grown(TOOL, ROOM - 80) + b"}",
    "tools of which one is called": b'{"messages":[{"role":"user","content":"a"}],"tool_choice":"required","tools":'
    + grown(TOOL, 60 * (len(TOOL) + 1))  # each takes 2 KB; of 250 functions at most, whatever the body's size
    + b"}",
}
CALLS = b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}'
RESULTS = b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}]}'
TURNS = {
    "turns": grown(b'{"role":"user","content":"a"}', ROOM - 80),
    "blocks": b'[{"role":"user","content":' + grown(b'{"type":"text","text":"a"}', ROOM - 120) + b"}]",
    "as many blocks as may be": b'[{"role":"user","content":' + grown(b'{"type":"text","text":"a"}', 27 * 300) + b"}]",
    "calls and results": grown(CALLS + b"," + RESULTS, ROOM - 80),
    "results of blocks": b'[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":'
    + grown(b'{"type":"text","text":"a"}', ROOM - 160)
    + b"}]}]",
}
VALUES = {
    "list of ids": grown(b"1", ROOM),
    "list of objects": grown(b"{}", ROOM),
    "as many objects as may be": grown(b"{}", 3 * (MOST_VALUES // SCALE - 40)),
    "as many objects as a field may have": grown(b"{}", 3 * (MOST_FIELD_VALUES // SCALE - 40)),
    "fields": many_fields(ROOM),
    "text": b'"' + b"a" * ROOM + b'"',
    "escapes": b'"' + rb"\ud83d\ude00" * (ROOM // 12) + b'"',
    "number": b"1" * ROOM,
    "objects in each other": b'{"a":' * (ROOM // 6) + b"1" + b"}" * (ROOM // 6),
}


def places(schema: dict[str, Any], defs: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Paths of fields, through objects and the items of lists, as a request's schema has them."""
    if depth > 3:
        return
    for one in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found = defs[one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        if found is not one:
            yield from places(found, defs, depth)
        for name, field in found.get("properties", {}).items():
            yield (name,)
            yield from ((name, *rest) for rest in places(field, defs, depth + 1))
        if "items" in found and isinstance(found["items"], dict):
            yield from (("[]", *rest) for rest in places(found["items"], defs, depth + 1))


def body_with(model: type[RequestModel], path: tuple[str, ...], value: bytes) -> bytes:
    text = value
    for step in reversed(path[1:]):
        text = b"[" + text + b"]" if step == "[]" else b'{"' + step.encode() + b'":' + text + b"}"
    others = b"".join(
        b'"' + name.encode() + b'":' + orjson.dumps(field) + b","
        for name, field in SMALL[model].items()
        if name != path[0]
    )
    return b"{" + others + b'"' + path[0].encode() + b'":' + text + b"}"


def read(model: type[RequestModel], data: bytes) -> ApiError | None:
    try:
        validated(model, parsed(data, model.token_fields, model.large_fields))
    except ApiError as error:
        return error
    return None


def num_errors(model: type[RequestModel], body: Any) -> int:
    try:
        model.model_validate(body)
    except pydantic.ValidationError as error:
        return error.error_count()
    return 0


class Nobody:
    """In place of coordinators: what was read and translated has cost what it costs."""

    def caller(self, metadata: object, held: object) -> Any:
        raise Unavailable("nobody serves")


async def called(app: Any, path: str, body: bytes) -> bytes:
    """The answer of a route, with its status before it."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    with ByteBudget(1 << 40, 1 << 40).hold("a client") as held:
        await app({**scope, "state": {"metadata": (), "held": held}}, receive, send)
    return b"%d " % sent[0]["status"] + sent[1]["body"]


def bodies(described: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """Each field of each route that takes a body, as /openapi.json has them, grown: the route, what grew, the body."""
    defs = described["components"]["schemas"]
    for route, methods in described["paths"].items():
        for asked in (told["requestBody"] for told in methods.values() if "requestBody" in told):
            schema = asked["content"]["application/json"]["schema"]
            model = MODELS[schema["$ref"].rpartition("/")[2]]
            for path in [*sorted(set(places(schema, defs))), ("unknown",)]:
                for kind, value in VALUES.items():
                    yield route, f"{'.'.join(path)}: {kind}", body_with(model, path, value)
    for kind, body in CONVERSATIONS.items():
        yield "/v1/chat/completions", kind, body
    for kind, turns in TURNS.items():
        yield "/v1/messages", kind, b'{"model":"m","max_tokens":1,"messages":' + turns + b"}"


@pytest.fixture
def smaller_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many values and bytes as a deployment takes, by the scale."""
    monkeypatch.setattr(json_reader, "MOST_VALUES", MOST_VALUES // SCALE)
    monkeypatch.setattr(json_reader, "MOST_FIELD_VALUES", MOST_FIELD_VALUES // SCALE)
    monkeypatch.setattr(json_reader, "MOST_FIELDS", MOST_FIELDS // SCALE)
    monkeypatch.setattr(json_reader, "_PIECE_BYTES", json_reader._PIECE_BYTES // SCALE)
    monkeypatch.setattr(messages, "MOST_CONVERSATION_VALUES", MOST_CONVERSATION_VALUES // SCALE)
    monkeypatch.setattr(forced_calls, "MAX_CONSTRAINT_BYTES", MAX_CONSTRAINT_BYTES // SCALE)


@pytest.mark.usefixtures("smaller_limits")
def test_whatever_grows_in_whatever_route_a_body_takes_few_times_the_bytes_of_the_largest() -> None:
    async def run() -> None:
        gateway = Gateway(
            GatewaySettings(
                coordinators=["localhost:1"], max_body_bytes=GROWN_BYTES, tool_parser="hermes", reasoning_parser="none"
            )
        )
        routes = set()
        try:
            app = build_app(replace(gateway.parts, coordinators=Nobody()))
            await called(app, "/tokenize", b"{}")
            for route, kind, body in bodies(app.openapi()):
                routes.add(route)
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                answer = await called(app, route, body)
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < MOST_BYTES, (route, kind)
                assert answer.startswith((b"400 ", b"503 ")), (route, kind)
                assert len(answer) < MOST_ANSWER_BYTES, (route, kind)
        finally:
            await gateway.stop(0)
        assert len(routes) == len(SMALL)

    tracemalloc.start()
    try:
        asyncio.run(run())
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("model", SMALL)
def test_a_wrong_list_makes_a_few_errors_however_long_it_is(model: type[RequestModel]) -> None:
    schema = model.model_json_schema()
    for path in sorted(set(places(schema, schema.get("$defs", {})))):
        for item in ITEMS:
            body = orjson.loads(body_with(model, path, grown(item, 600)))
            assert num_errors(model, body) <= MOST_ERRORS, (path, item)


@pytest.mark.parametrize("item", [*ITEMS, b'"x":'])
def test_a_body_of_8_mib_is_given_up_once_it_has_too_many_values(item: bytes) -> None:
    text = many_fields(8 << 20) if item.endswith(b":") else grown(item, 8 << 20)
    data = b'{"prompt": "a", "bad_words": ' + text + b"}"
    error = read(CompletionRequest, data)
    assert error is not None
    assert error.param == "bad_words"


def test_reading_ends_where_there_are_too_many_values() -> None:
    bodies = [b'{"prompt": "a", "bad_words": ' + grown(b"1", size) + b"}" for size in (420_000, 500_000)]
    first, second = (lines_run(lambda data=data: read(CompletionRequest, data)) for data in bodies)
    assert first == second


def test_token_ids_are_packed_many_at_a_time() -> None:
    ids = list(range(0, 900_000, 3))
    asked = validated(CompletionRequest, parsed(orjson.dumps({"prompt": ids}), CompletionRequest.token_fields))
    [body] = completion_to_generate(asked, 10)
    assert list(body.prompt_token_ids.token_ids) == ids
    data = orjson.dumps({"prompt": ids})
    assert lines_run(lambda: parsed(data, CompletionRequest.token_fields)) < len(ids) / 100


@pytest.mark.parametrize(("ids", "param"), [("[1,2,-3]", "prompt[2]"), ("[[1],[2,99999999999]]", "prompt[1][1]")])
def test_the_first_wrong_token_id_is_named(ids: str, param: str) -> None:
    error = read(CompletionRequest, b'{"prompt": ' + ids.encode() + b"}")
    assert error is not None
    assert error.param == param


MIB = 2**20
LARGE = {
    "ids of a digit": grown(b"7", 8 * MIB),
    "ids of five digits": grown(b"30000", 8 * MIB),
    "text": b'"' + b"a b " * (2 * MIB) + b'"',
    "wide text": b'"' + b"a" * (8 * MIB) + "😀".encode() + b'"',
    "escapes": b'"' + rb"\n" * (4 * MIB) + b'"',
    "lists": grown(b"[]", 8 * MIB),
    "lists of an id": grown(b"[1]", 8 * MIB),
    "texts": grown(b'"a"', 8 * MIB),
    "objects": grown(b"{}", 8 * MIB),
    "no ids at the end": grown(b"7", 8 * MIB)[:-1] + b",-1]",
}


@pytest.mark.parametrize("kind", LARGE)
def test_the_largest_body_takes_few_times_its_bytes(kind: str) -> None:
    data = b'{"prompt":' + LARGE[kind] + b"}"
    tracemalloc.start()
    try:
        error = read(CompletionRequest, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error is None) == (kind.startswith("ids") or kind in ("text", "wide text", "escapes"))
    # A text of Python takes four bytes a character where one is beyond 16 bits, and its decoder half as much besides.
    assert peak < (8 if kind == "wide text" else 4) * len(data)


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("structured_outputs", {"regex": "a" * 300_000}, "sampling.constraint"),
        ("stop", ["a" * 300_000], "sampling.stop"),
        ("model", "a" * 300_000, "model"),
    ],
)
def test_parameters_that_each_of_many_prompts_takes_along_are_small(name: str, value: Any, param: str) -> None:
    completion_to_generate(validated(CompletionRequest, {"prompt": ["x"], name: value}), 256)
    with pytest.raises(InvalidRequest) as caught:
        completion_to_generate(validated(CompletionRequest, {"prompt": ["x"] * 256, name: value}), 256)
    assert caught.value.field == param


def test_requests_of_many_prompts_are_made_one_at_a_time() -> None:
    body = {"prompt": ["x"] * 256, "allowed_token_ids": list(range(16_000))}
    requests = completion_to_generate(validated(CompletionRequest, body), 256)
    requests.request_id = "a"
    assert lines_run(lambda: completion_to_generate(validated(CompletionRequest, body), 256)) < 1000
    assert [requests[0].request_id, requests[255].request_id] == ["a-0", "a-255"]
