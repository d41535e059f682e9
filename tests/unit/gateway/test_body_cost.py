"""What a body may cost, whatever grows in it."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from typing import Any

import orjson
import pydantic
import pytest

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.problems import validated
from specdec.gateway.app import build_app
from specdec.gateway.chat import messages
from specdec.gateway.http import json_reader
from specdec.gateway.http.json_reader import MOST_FIELD_VALUES, MOST_FIELDS, MOST_VALUES, parsed
from specdec.gateway.service import Gateway
from specdec.gateway.settings import GatewaySettings
from specdec.gateway.translation import forced_calls
from specdec.gateway.translation.completion_request import completion_to_generate
from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import MOST_CONVERSATION_VALUES
from tests.support.cost import lines_run
from tests.support.costly.bodies import SMALL, Nobody, bodies, body_with, called, grown, many_fields, places

SCALE = 256
"""A gateway's limits are so much smaller here than a deployment's: all that a body costs goes by them."""
GROWN_BYTES = 8 * 2**20 // SCALE
MOST_BYTES = 9 * GROWN_BYTES // 2
"""Of memory, over all that is done with a body: four times the largest one's, and what any takes."""
MOST_ANSWER_BYTES = 700
"""Of an error, which has the beginning of what was sent, as text of at most four bytes a character."""
MOST_ERRORS = 40
"""Of one value: as many as a union has members, each with its own."""
ITEMS = (b"1", b"-1", b'"a"', b"{}", b"[1]", b"1.5")


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
            for route, kind, body in bodies(app.openapi(), SCALE):
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
        paths = app.openapi()["paths"]
        assert routes == {path for path in paths if any("requestBody" in method for method in paths[path].values())}

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
