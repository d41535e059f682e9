"""JSON is read as orjson reads it, within limits."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.gateway.api.errors import ApiError
from specdec.gateway.http.json_reader import MOST_DEPTH, MOST_FIELD_VALUES, MOST_VALUES, parsed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(value=JSON, indent=st.booleans(), ascii_only=st.booleans())
def test_values_are_those_of_orjson(value: Any, indent: bool, ascii_only: bool) -> None:
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
    broken = (text[:place] + put + text[place + cut :]).removeprefix(b"\xef\xbb\xbf")
    try:
        orjson.loads(broken)
    except orjson.JSONDecodeError:
        with pytest.raises(ApiError):
            parsed(broken)
        return
    assert parsed(broken) == json.loads(broken)


def test_a_byte_order_mark_before_the_body_is_skipped() -> None:
    assert parsed(b'\xef\xbb\xbf {"a": 1}') == {"a": 1}
    for broken in (b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf1", b"1\xef\xbb\xbf"):
        with pytest.raises(ApiError):
            parsed(broken)


@pytest.mark.parametrize("digits", [19, 20, 30, 308])
def test_integers_keep_all_their_digits(digits: int) -> None:
    for value in (int("9" * digits), -int("9" * digits)):
        read = parsed(json.dumps({"a": [value, float(value)]}).encode())["a"]
        assert read == [value, float(value)]
        assert [type(one) for one in read] == [int, float]


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


@pytest.mark.parametrize(
    ("data", "field"), [(b'{"a":1,"\\ud800":2}', None), (b'{"a":1,"b":}', "b")], ids=["name", "value"]
)
def test_no_other_field_is_named_than_that_which_is_wrong(data: bytes, field: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(data)
    assert caught.value.param == field


@pytest.mark.parametrize("name", ["ids", "large", "small"])
def test_a_field_has_as_many_values_as_its_kind_may(name: str) -> None:
    def read(num: int) -> Any:
        data = b'{"first":[1],"' + name.encode() + b'":[' + b'"",' * (num - 1) + b'""],"last":[2]}'
        return parsed(data, {"ids"}, {"large"})

    most = MOST_FIELD_VALUES - 1 if name == "small" else MOST_VALUES - 6
    assert len(read(most)[name]) == most
    with pytest.raises(ApiError) as caught:
        read(most + 2)
    assert caught.value.param in (name, "last")


def test_spaces_are_read_in_pieces() -> None:
    assert parsed(b"[" + b" \n" * 100_000 + b"1" + b"\t" * 100_000 + b"]" + b"\r" * 100_000) == [1]
