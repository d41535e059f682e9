"""Bodies of requests over HTTP in which something has grown: what grows, where, and the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from specdec.gateway.anthropic.request import CountTokensRequest, MessagesRequest
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.tokens import DetokenizeBody, TokenizeBody
from specdec.gateway.http.json_reader import MOST_FIELD_VALUES, MOST_VALUES
from specdec.gateway.responses.request import ResponsesRequest
from specdec.service.byte_budget import ByteBudget
from specdec.wire.errors import Unavailable

LARGEST_BYTES = 8 * 2**20
MOST_FUNCTIONS = 250
_LEAST_SCALE = 256
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


def grown(item: bytes, size: int) -> bytes:
    """A list of equal items."""
    return b"[" + ((item + b",") * (size // (len(item) + 1)))[:-1] + b"]"


def many_fields(size: int) -> bytes:
    return b"{" + b",".join(b'"f%d":1' % number for number in range(size // 10)) + b"}"


def values(scale: int) -> dict[str, bytes]:
    """Values of a field, as large as a body may be, divided by `scale`."""
    room = _room(scale)
    return {
        "list of ids": grown(b"1", room),
        "list of objects": grown(b"{}", room),
        "as many objects as may be": grown(b"{}", 3 * (MOST_VALUES // scale - 40)),
        "as many objects as a field may have": grown(b"{}", 3 * (MOST_FIELD_VALUES // scale - 40)),
        "fields": many_fields(room),
        "text": b'"' + b"a" * room + b'"',
        "escapes": b'"' + rb"\ud83d\ude00" * (room // 12) + b'"',
        "number": b"1" * room,
        "objects in each other": b'{"a":' * (room // 6) + b"1" + b"}" * (room // 6),
    }


def conversations(scale: int) -> dict[str, bytes]:
    """Bodies of chats."""
    room, more = _room(scale), _LEAST_SCALE // scale
    call = b'{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":{}}}]}'
    tool = b'{"type":"function","function":{"name":"f"}}'
    part = b'{"type":"text","text":"a"}'
    user = b'{"messages":[{"role":"user","content":'
    num_tools = min(MOST_FUNCTIONS, 60 * more)  # each takes 2 KB
    return {
        "messages": b'{"messages":' + grown(b'{"role":"user","content":"a"}', room) + b"}",
        "calls": b'{"messages":' + grown(call, room) + b"}",
        "parts": user + grown(part, room - 80) + b"}]}",
        "parts that are texts": user + grown(b'"a"', 4 * 700 * more) + b"}]}",
        "parts of a prediction": user + b'"a"}],"prediction":{"type":"content","content":'
        + grown(part, 240 * 27 * more) + b"}}",
        "tools": user + b'"a"}],"tools":' + grown(tool, room - 80) + b"}",
        "tools of which one is called": user + b'"a"}],"tool_choice":"required","tools":'
        + grown(tool, num_tools * (len(tool) + 1)) + b"}",
    }  # fmt: skip


def turns(scale: int) -> dict[str, bytes]:
    """Messages of Anthropic's form."""
    room, more = _room(scale), _LEAST_SCALE // scale
    block = b'{"type":"text","text":"a"}'
    user = b'[{"role":"user","content":'
    call = b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}'
    result = b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}]}'
    return {
        "turns": grown(b'{"role":"user","content":"a"}', room - 80),
        "blocks": user + grown(block, room - 120) + b"}]",
        "as many blocks as may be": user + grown(block, 27 * 300 * more) + b"}]",
        "calls and results": grown(call + b"," + result, room - 80),
        "results of blocks": user + b'[{"type":"tool_result","tool_use_id":"a","content":'
        + grown(block, room - 160) + b"}]}]",
    }  # fmt: skip


def responses(scale: int) -> dict[str, bytes]:
    """Bodies of responses."""
    room, more = _room(scale), _LEAST_SCALE // scale
    call = b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}'
    result = b'{"type":"function_call_output","call_id":"a","output":'
    both = call + b"," + result + b'"b"}'
    thought = b'{"type":"reasoning","content":[{"type":"reasoning_text","text":"a"}]}'
    function = b'{"type":"function","name":"f"}'
    num_functions = min(MOST_FUNCTIONS, 60 * more)
    return {
        "messages": b'{"input":' + grown(b'{"role":"user","content":"a"}', room) + b"}",
        "what was said": b'{"input":' + grown(b'{"role":"assistant","content":"a"}', room) + b"}",
        "calls": b'{"input":' + grown(call, room) + b"}",
        "as many calls as may be": b'{"input":' + grown(call, 64 * more * (len(call) + 1)) + b"}",
        "calls and results": b'{"input":' + grown(both, room) + b"}",
        "as many calls and results as may be": b'{"input":' + grown(both, 32 * more * (len(both) + 1)) + b"}",
        "thoughts": b'{"input":' + grown(thought, room) + b"}",
        "a result of parts": b'{"input":[' + result + grown(b'{"type":"input_text","text":"a"}', room - 160) + b"}]}",
        "what another server ran": b'{"input":' + grown(b'{"type":"web_search_call"}', room) + b"}",
        "a patch": b'{"input":[{"type":"custom_tool_call","call_id":"a","name":"f","input":"'
        + rb"\n" * (room // 2 - 60) + b'"}]}',
        "functions": b'{"input":"a","tools":' + grown(function, room) + b"}",
        "as many functions as may be": b'{"input":"a","tool_choice":"required","tools":'
        + grown(function, num_functions * (len(function) + 1)) + b"}",
        "members of a namespace": b'{"input":"a","tools":[{"type":"namespace","name":"n","tools":'
        + grown(function, room) + b"}]}",
        "other tools": b'{"input":"a","tools":' + grown(b'{"type":"web_search"}', room) + b"}",
        "allowed tools": b'{"input":"a","tools":[{"type":"function","name":"f"}],"tool_choice":'
        + b'{"type":"allowed_tools","mode":"auto","tools":' + grown(function, room - 200) + b"}}",
    }  # fmt: skip


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


def bodies(described: dict[str, Any], scale: int, most_depth: int = 99) -> Iterator[tuple[str, str, bytes]]:
    """Each field of each route that takes a body, as /openapi.json has them, grown: the route, what grew, the body.

    `most_depth`: names in the path of a field, at most.
    """
    defs, grown_values = described["components"]["schemas"], values(scale)
    for route, methods in described["paths"].items():
        for asked in (told["requestBody"] for told in methods.values() if "requestBody" in told):
            schema = asked["content"]["application/json"]["schema"]
            model = MODELS[schema["$ref"].rpartition("/")[2]]
            for path in [*sorted(set(places(schema, defs))), ("unknown",)]:
                if len(path) > most_depth:
                    continue
                for kind, value in grown_values.items():
                    yield route, f"{'.'.join(path)}: {kind}", body_with(model, path, value)
    for kind, body in conversations(scale).items():
        yield "/v1/chat/completions", kind, body
    for kind, messages in turns(scale).items():
        yield "/v1/messages", kind, b'{"model":"m","max_tokens":1,"messages":' + messages + b"}"
    for kind, body in responses(scale).items():
        yield "/v1/responses", kind, body


def _room(scale: int) -> int:
    return LARGEST_BYTES // scale - 512


class Nobody:
    """In place of coordinators: what was read and translated has cost what it costs."""

    def serving(self, model: str) -> str:
        return ""

    def caller(self, metadata: object, held: object, model: str) -> Any:
        raise Unavailable("nobody serves")


KIND = (b"content-type", b"application/json")


async def called(app: Any, path: str, body: bytes) -> bytes:
    """The answer of a route, with its status before it."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [KIND]}
    with ByteBudget(1 << 40, 1 << 40).hold("a client") as held:
        await app({**scope, "state": {"metadata": (), "held": held}}, receive, send)
    return b"%d " % sent[0]["status"] + sent[1]["body"]
