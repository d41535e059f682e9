"""JSON texts of a conversation, read within one bound for all of them."""

from __future__ import annotations

import json
import math
from typing import Any

from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import MOST_CONVERSATION_VALUES as _MOST_VALUES

_MOST_DEPTH = 64
"""Of lists and objects in each other; templates walk them recursively."""


class JsonValues:
    """Reads JSON texts that have a bound together."""

    def __init__(self) -> None:
        self._num_left = _MOST_VALUES

    def read(self, field: str, text: str, kind: type[list] | type[dict]) -> Any:
        """The value of a text, a list or an object as `kind` says. Raises InvalidRequest."""
        try:
            value = _load(text)
        except RecursionError as error:
            raise InvalidRequest(field, f"is deeper than {_MOST_DEPTH}") from error
        except ValueError as error:
            raise InvalidRequest(field, f"is not JSON: {error}") from error
        if not isinstance(value, kind):
            raise InvalidRequest(field, f"must be a JSON {'array' if kind is list else 'object'}")
        self._count(field, value)
        return value

    def read_object(self, field: str, text: str) -> dict[str, Any] | None:
        """The object that a text is; None where it is none. Raises InvalidRequest for one beyond the bounds."""
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
        raise InvalidRequest(field, f"is deeper than {_MOST_DEPTH}")


def _load(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number
