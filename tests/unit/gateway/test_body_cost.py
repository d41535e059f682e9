"""What a body may cost, whatever grows in it; and that it is read as orjson reads it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import orjson
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.problems import validated
from specdec.gateway.api.responses import ResponsesRequest
from specdec.gateway.api.tokens import DetokenizeBody, TokenizeBody
from specdec.gateway.http.json_reader import MOST_DEPTH, MOST_VALUES, parsed
from specdec.gateway.translation.completion_request import completion_to_generate
from specdec.wire.errors import InvalidRequest
from tests.support.cost import lines_run

GROWN_BYTES = 1024
MOST_BYTES_PER_BYTE = 100
"""Of memory: an object takes 64 bytes, its copy as many, and their places in lists; in the text it has three."""
MOST_ERRORS = 40
"""Of one value: as many as a union has members, each with its own."""
SMALL: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    TokenizeBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": [1]},
}
ITEMS = (b"1", b"-1", b'"a"', b"{}", b"[1]", b"1.5")


def grown(item: bytes, size: int = GROWN_BYTES) -> bytes:
    """A list of equal items."""
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def many_fields(size: int = GROWN_BYTES) -> bytes:
    return b"{" + b",".join(b'"f%d":1' % number for number in range(size // 10)) + b"}"


VALUES = {
    **{f"list of {item.decode()}": grown(item) for item in ITEMS},
    "fields": many_fields(),
    "text": b'"' + b"a" * GROWN_BYTES + b'"',
    "escapes": b'"' + rb"\ud83d\ude00" * (GROWN_BYTES // 12) + b'"',
    "number": b"1" * GROWN_BYTES,
    "depth": b"[" * (GROWN_BYTES // 2) + b"]" * (GROWN_BYTES // 2),
    "objects in each other": b'{"a":' * (GROWN_BYTES // 6) + b"1" + b"}" * (GROWN_BYTES // 6),
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
        validated(model, parsed(data, model.token_fields))
    except ApiError as error:
        return error
    return None


def num_errors(model: type[RequestModel], body: Any) -> int:
    try:
        model.model_validate(body)
    except pydantic.ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("model", SMALL)
def test_every_field_costs_a_small_multiple_of_its_bytes(model: type[RequestModel]) -> None:
    schema = model.model_json_schema()
    found = [*sorted(set(places(schema, schema.get("$defs", {})))), ("unknown",)]
    assert len(found) >= 3
    tracemalloc.start()
    try:
        for path in found:
            for kind, value in VALUES.items():
                data = body_with(model, path, value)
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                error = read(model, data)
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < MOST_BYTES_PER_BYTE * len(data), (path, kind)
                if error is not None:
                    assert len(str(error)) + len(error.param or "") < 4200, (path, kind)
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
    assert (error is None) == (kind.startswith("ids") or kind in ("text", "escapes"))
    assert peak < 4 * len(data)


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(value=JSON, indent=st.booleans(), ascii_only=st.booleans())
def test_values_are_those_of_orjson(value: Any, indent: bool, ascii_only: bool) -> None:
    import json

    text = json.dumps(value, indent=2 if indent else None, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        expected = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(ApiError):
            parsed(text)
        return
    assert parsed(text) == expected


@given(value=JSON, at=st.floats(0, 1), put=st.binary(min_size=0, max_size=3), cut=st.integers(0, 3))
def test_what_orjson_refuses_is_refused(value: Any, at: float, put: bytes, cut: int) -> None:
    text = orjson.dumps(value)
    place = int(at * len(text))
    broken = text[:place] + put + text[place + cut :]
    try:
        expected = orjson.loads(broken)
    except orjson.JSONDecodeError:
        with pytest.raises(ApiError):
            parsed(broken)
        return
    assert parsed(broken) == expected


@given(
    pieces=st.lists(
        st.sampled_from(
            ["a" * 40_000, "é" * 30_000, "😀" * 9000, "\\u00e9" * 6000, "\\ud83d\\ude00" * 3000, "\\n", "x"]
        ),
        min_size=1,
        max_size=6,
    )
)
def test_long_texts_are_read_in_pieces_without_cutting_a_character(pieces: list[str]) -> None:
    text = ('"' + "".join(pieces) + '"').encode()
    assert parsed(text) == orjson.loads(text)


def test_depth_and_numbers_of_values_have_limits() -> None:
    assert parsed(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH)
    for data in (b"[" * (MOST_DEPTH + 1), b"[" + b"0," * MOST_VALUES + b"0]", b'"\\ud800"' * 1, b'"' + b"a" * 10):
        with pytest.raises(ApiError):
            parsed(data)
