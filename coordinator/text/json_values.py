"""Parse a conversation's JSON texts within one common bound."""

from __future__ import annotations

import json
import math
from typing import Any

from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import MOST_CONVERSATION_VALUES as _MOST_VALUES

_MOST_DEPTH = 64
"""Depth of nested lists and objects, at most: templates walk them recursively."""


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

    def read_object(self, field: str, text: str) -> dict[str, Any] | None:
        """The object in a text, or None if it is no object. Raises InvalidRequest beyond the bounds."""
        try:
            value = _load(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        self._count(field, value)
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
