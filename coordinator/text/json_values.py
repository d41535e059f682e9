"""Parse a conversation's JSON texts within one common bound."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pydantic_core import from_json

from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import MOST_CONVERSATION_VALUES as _MOST_VALUES

_MOST_DEPTH = 64
"""Depth of nested lists and objects, at most: templates walk them recursively."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""A string of a JSON text; its end may be cut."""
_CONTROL = re.compile(r"[\x00-\x1f]")
_PLACE = re.compile(r"at line (\d+) column (\d+)")


class JsonValues:
    """Parses JSON texts whose values are bounded together."""

    def __init__(self) -> None:
        self._num_left = _MOST_VALUES

    def read(self, field: str, text: str, kind: type[list] | type[dict]) -> Any:
        """The list or object (`kind`) in a text. Raises InvalidRequest."""
        try:
            value = _load(text)
        except RecursionError as error:
            raise InvalidRequest(field, f"is nested deeper than {_MOST_DEPTH}") from error
        except ValueError as error:
            raise InvalidRequest(field, f"is not JSON: {error}") from error
        if not isinstance(value, kind):
            raise InvalidRequest(field, f"must be a JSON {'array' if kind is list else 'object'}")
        self._count(field, value)
        return value

    def read_object(self, field: str, text: str) -> dict[str, Any]:
        """The object in a text; of a text that is cut or malformed, the object as far as it goes, which may be empty.

        Raises:
            InvalidRequest: a whole object is beyond the bounds.
        """
        try:
            value = _load(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and not _has_surrogates(text):
            self._count(field, value)
            return value
        value = _as_far_as_it_goes(text)
        try:
            self._count(field, value)
        except InvalidRequest:
            return {}
        return value

    def _count(self, field: str, value: Any) -> None:
        level: list[Any] = [value]
        for _ in range(_MOST_DEPTH):
            inner = [container.values() if isinstance(container, dict) else container for container in level]
            self._num_left -= sum(map(len, inner))
            if self._num_left < 0:
                raise InvalidRequest(field, f"the conversation has more than {_MOST_VALUES} values")
            level = [item for items in inner for item in items if isinstance(item, (dict, list))]
            if not level:
                return
        raise InvalidRequest(field, f"is nested deeper than {_MOST_DEPTH}")


def _load(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


def _has_surrogates(text: str) -> bool:
    """Whether a JSON text may have half of a surrogate pair, which no prompt can hold."""
    return "\\ud" in text.lower()


def _as_far_as_it_goes(text: str) -> dict[str, Any]:
    """The object that a text begins, without the first faulty value and all that follows; empty if it begins none."""
    text = _STRING.sub(lambda match: _CONTROL.sub(lambda control: f"\\u{ord(control[0]):04x}", match[0]), text)
    data = text.encode(errors="replace")
    value: Any = None
    for _ in range(2):
        try:
            value = from_json(data, allow_partial="trailing-strings")
            break
        except ValueError as error:
            data = data[: _place(data, str(error))]
    if not isinstance(value, dict):
        return {}
    # What is no JSON, such as infinity and half of a surrogate pair, is replaced.
    told = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    whole: dict[str, Any] = json.loads(told, parse_constant=lambda _: None)
    return whole


def _place(data: bytes, error: str) -> int:
    """The byte at which a parser's error says that a text is faulty."""
    if (found := _PLACE.search(error)) is None:
        return 0
    lines = data.split(b"\n")[: int(found[1]) - 1]
    return max(0, sum(len(line) + 1 for line in lines) + int(found[2]) - 1)
