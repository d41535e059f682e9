"""Parse JSON at a bounded cost: parsing stops where the text becomes too deep or has too many values.

Structure is read here, texts and numbers by orjson in pieces: no call keeps the interpreter for long, so a reading
thread does not hold up the event loop. Only token ids come in millions; they are packed as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import orjson

from specdec.gateway.api.errors import ApiError, cut, invalid
from specdec.gateway.api.fields import PackedIds
from specdec.gateway.api.problems import short

MOST_DEPTH = 64
"""Depth of nested objects and lists, at most; deep tool schemas have twenty."""
MOST_FIELDS = 16 * 1024
"""Fields of one object, at most."""
MOST_VALUES = 200_000
"""Values of a body besides token ids, at most: a conversation has up to 100,000, and 16384 messages three each besides;
lists of sampling parameters have 20,000."""
MOST_FIELD_VALUES = 32 * 1024
"""Values of a field outside the conversation, at most: lists of token ids have half."""
_PIECE_BYTES = 64 * 1024
"""Bytes read in one call, which takes half a millisecond."""
_FEW_IDS = 256
"""Token ids that stay a list and count as values."""
_MOST_KEYS = 1024
"""Keys kept, so that equal keys share one string."""
_MOST_NUMBER_CHARS = 512
_SPACE = re.compile(rb"[ \t\n\r]*+")
_TEXT = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"')
_TEXT_PIECE = re.compile(
    rb'(?:[^"\\\x00-\x1f]++|\\(?:[^u]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*+"
)
"""A piece of a text that cuts no escape and no surrogate pair in two."""
_ESCAPED_CHARS = 12
"""Characters of the longest escape, a surrogate pair."""
_BARE = re.compile(rb"[-+0-9.eE]++|true|false|null")
_IDS = re.compile(rb"[0-9, \t\n\r]*+")
_QUOTE, _COMMA, _COLON, _LIST, _LIST_END, _OBJECT, _OBJECT_END = b'",:[]{}'


def parsed(data: bytes | bytearray, token_fields: Collection[str] = (), large_fields: Collection[str] = ()) -> Any:
    """The value of a JSON text.

    Args:
        data: UTF-8.
        token_fields: fields of the outermost object whose long lists of token ids, and such lists in them, become
            `PackedIds`.
        large_fields: further fields of it that may have more than `MOST_FIELD_VALUES`.

    Raises:
        ApiError: the text is no JSON, too deep, or has too many values, or a list of token ids has another value.
    """
    return _Reader(data, token_fields, {*token_fields, *large_fields}).whole()


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Start of what some Windows programs write as UTF-8."""


class _Reader:
    def __init__(self, data: bytes | bytearray, token_fields: Collection[str], large_fields: Collection[str]) -> None:
        self._data = data
        self._at = len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0
        self._token_fields = token_fields
        self._large_fields = large_fields
        self._num_left = self._most = MOST_VALUES
        self._keys: dict[bytes, str] = {}
        self._field: str | None = None
        """The field of the outermost object that is being read."""

    def whole(self) -> Any:
        try:
            self._skip_space()
            value = self._value(0)
            self._skip_space()
        except IndexError:
            raise self._no_json("it ends too early") from None
        if self._at < len(self._data):
            raise self._no_json("more follows")
        return value

    def _value(self, depth: int) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise self._refused(f"there are more than {self._most} values")
        first = self._data[self._at]
        if first == _QUOTE:
            return self._text()
        if first == _OBJECT:
            return self._object(depth + 1)
        if first == _LIST:
            return self._list(depth + 1)
        found = _BARE.match(self._data, self._at, self._at + _MOST_NUMBER_CHARS)
        if found is None or found.end() == self._at + _MOST_NUMBER_CHARS:
            raise self._no_json("a value is expected")
        value = self._loaded(found[0])
        if isinstance(value, float) and found[0].lstrip(b"-").isdigit():
            value = int(found[0])  # beyond 64 bits orjson reads the nearest float
        self._at = found.end()
        return value

    def _object(self, depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._is_empty(depth, _OBJECT_END):
            return fields
        while True:
            if depth == 1:
                self._field = None
            name = self._key()
            fields[name] = self._outermost(name) if depth == 1 else self._value(depth)
            if len(fields) > MOST_FIELDS:
                raise self._refused(f"an object of the body has more than {MOST_FIELDS} fields")
            if self._ends(_OBJECT_END):
                return fields

    def _outermost(self, name: str) -> Any:
        """The value of a field of the outermost object, within the field's own limit of values."""
        self._field = name
        beyond = 0 if name in self._large_fields else max(0, self._num_left - MOST_FIELD_VALUES)
        self._num_left -= beyond
        self._most = MOST_FIELD_VALUES if beyond else MOST_VALUES
        is_ids = name in self._token_fields and self._data[self._at] == _LIST
        value = self._token_ids(name, 2) if is_ids else self._value(1)
        self._num_left += beyond
        return value

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        if self._is_empty(depth, _LIST_END):
            return items
        while True:
            items.append(self._value(depth))
            if self._ends(_LIST_END):
                return items

    def _token_ids(self, path: str, depth: int) -> Any:
        """A list of token ids; another list is read as usual, with lists in it read as lists of ids."""
        if self._is_empty(depth, _LIST_END):
            return []
        ids = PackedIds()
        while True:
            self._skip_space()
            found = _IDS.match(self._data, self._at, self._at + _PIECE_BYTES)
            end = found.end() if found else self._at
            is_last = self._data[end] == _LIST_END
            stop = end if is_last else self._data.rfind(b",", self._at, end)
            if stop < 0:
                break
            piece = self._loaded(b"[" + self._data[self._at : stop] + b"]")
            if not piece:
                raise self._no_json("a value is expected")
            self._at = stop + 1
            if is_last and not ids and len(piece) <= _FEW_IDS:
                self._num_left -= len(piece)
                return piece
            _add(path, ids, piece)
            if is_last:
                return ids
        if ids:
            raise _no_id(f"{path}[{len(ids)}]", self._value(depth))
        items: list[Any] = []
        while True:
            is_list = self._data[self._at] == _LIST
            self._num_left -= is_list
            is_within = is_list and depth == 2 and self._num_left >= 0
            items.append(self._token_ids(f"{path}[{len(items)}]", depth + 1) if is_within else self._value(depth))
            if self._ends(_LIST_END):
                return items

    def _key(self) -> str:
        if self._data[self._at] != _QUOTE:
            raise self._no_json("the name of a field is expected")
        name = self._text(is_key=True)
        self._skip_space()
        if self._data[self._at] != _COLON:
            raise self._no_json("a colon is expected")
        self._at += 1
        self._skip_space()
        return name

    def _text(self, *, is_key: bool = False) -> str:
        found = _TEXT.match(self._data, self._at, self._at + _PIECE_BYTES)
        if found is None:
            return self._long_text()
        written = found[0]
        text: str | None = self._keys.get(written) if is_key else None
        if text is None:
            text = str(self._loaded(written))
            if is_key and len(self._keys) < _MOST_KEYS:
                self._keys[written] = text
        self._at = found.end()
        return text

    def _long_text(self) -> str:
        """A long text, joined as UTF-8: one emoji makes a Python string four times as large."""
        told = bytearray()
        self._at += 1
        while self._data[self._at] != _QUOTE:
            most = self._at + _PIECE_BYTES
            found = _TEXT_PIECE.match(self._data, self._at, most)
            end = found.end() if found else self._at
            if end == self._at or (self._data[end : end + 1] != b'"' and end < most - _ESCAPED_CHARS):
                raise self._no_json("a text is not well-formed")
            while end < len(self._data) and self._data[end] & 0xC0 == 0x80 and end > self._at + 1:
                end -= 1  # within a character
            piece = self._data[self._at : end]
            told += str(self._loaded(b'"' + piece + b'"')).encode() if b"\\" in piece else piece
            self._at = end
        self._at += 1
        try:
            return told.decode()
        except UnicodeDecodeError:
            raise self._no_json("a text is not UTF-8") from None

    def _is_empty(self, depth: int, end: int) -> bool:
        """Enter a list or object; returns whether it is empty."""
        if depth > MOST_DEPTH:
            raise self._refused(f"the body is nested more than {MOST_DEPTH} deep")
        self._at += 1
        self._skip_space()
        if self._data[self._at] != end:
            return False
        self._at += 1
        return True

    def _ends(self, end: int) -> bool:
        """Skip the comma or end after a value; returns whether it was the end."""
        self._skip_space()
        found = self._data[self._at]
        if found not in (_COMMA, end):
            raise self._no_json("a comma or an end is expected")
        self._at += 1
        if found == _COMMA:
            self._skip_space()
        return found == end

    def _skip_space(self) -> None:
        while self._data[self._at : self._at + 1] in (b" ", b"\n", b"\r", b"\t"):
            found = _SPACE.match(self._data, self._at, self._at + _PIECE_BYTES)
            self._at = found.end() if found else self._at

    def _loaded(self, written: bytes | bytearray) -> Any:
        try:
            return orjson.loads(written)
        except orjson.JSONDecodeError as error:
            raise self._no_json(str(error.msg)) from None

    def _no_json(self, problem: str) -> ApiError:
        return self._refused(f"the body is not valid JSON at byte {self._at}: {problem}")

    def _refused(self, problem: str) -> ApiError:
        return invalid(self._field and cut(self._field), problem, "invalid_json")


def _add(path: str, ids: PackedIds, piece: list[Any]) -> None:
    try:
        ids.add(piece)
    except (ValueError, TypeError):
        index = next(index for index, value in enumerate(piece) if not isinstance(value, int) or value >= 2**32)
        raise _no_id(f"{path}[{len(ids) + index}]", piece[index]) from None


def _no_id(path: str, value: Any) -> ApiError:
    is_type = not isinstance(value, int) or isinstance(value, bool)
    what, code = ("type", "invalid_type") if is_type else ("value", "invalid_value")
    message = f"Invalid {what} for '{path}': Input should be a token id below 2**32, got {short(value)}."
    return ApiError(400, message, param=path, code=code)
