"""Calls as Qwen3-Coder writes them, in tags: <tool_call><function=f><parameter=a>1</parameter>..."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.gateway.chat.deltas import may_become, split_at_marker
from specdec.gateway.chat.tool_calls.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.call_object import MOST_NAME_CHARS
from specdec.gateway.chat.tool_calls.typed_text import as_json_of_type, types_of

_CALL = "<tool_call>"
_END_CALL = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"
_VALUE_ENDS = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)
"""Ends of a value: models may forget </parameter>, so the next parameter or the function's end ends it, too."""


class Qwen3CoderParser(BufferedParser):
    """Values are written without types: the function's schema names them.

    A text streams. Any other value is emitted at its end, as JSON; a value that does not fit its type is emitted as a
    text. A line break at either end of a value is layout.
    """

    starts: ClassVar = (_CALL, _FUNCTION)

    def __init__(self, schemas: Mapping[str, Any] | None = None) -> None:
        """`schemas`: the JSON schema of each function's parameters; without one all values are texts."""
        super().__init__()
        self._schemas = schemas or {}
        self._function = ""
        self._types: frozenset[str] = frozenset()
        self._value = ""
        self._has_parameters = False
        self._at_start = False

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._state = self._before_function if marker == _CALL else self._name
        return True

    def _before_function(self) -> bool:
        if not self._hold_space() or may_become(self._buffer, _FUNCTION):
            return False
        if not self._buffer.startswith(_FUNCTION):
            return self._no_call()
        self._hold(len(_FUNCTION))
        self._state = self._name
        return True

    def _name(self) -> bool:
        name, end, rest = split_at_marker(self._buffer, [">"])
        if len(name) > MOST_NAME_CHARS or "\n" in name or (end and not name.strip()):
            return self._no_call()
        if not end:
            return False
        self._buffer, self._raw = rest, ""
        self._function, self._has_parameters = name.strip(), False
        self._writer.begin_call(self._function)
        self._writer.arguments("{")
        self._state = self._between
        return True

    def _between(self) -> bool:
        """The state before a parameter or the function's end. Other text here is content."""
        text, marker, self._buffer = split_at_marker(self._buffer, [_PARAMETER, _END_FUNCTION, _END_CALL])
        self._writer.content(text)
        if marker == _PARAMETER:
            self._state = self._key
        elif marker:
            self._end_function()
            self._state = self._after_function if marker == _END_FUNCTION else self._text
        return bool(marker)

    def _key(self) -> bool:
        key, end, rest = split_at_marker(self._buffer, [">"])
        if len(key) > MOST_NAME_CHARS or "\n" in key:
            self._buffer = _PARAMETER[1:] + self._buffer
            self._writer.content(_PARAMETER[0])
            self._state = self._between
            return True
        if not end:
            return False
        self._buffer = rest
        key = key.strip()
        self._types = types_of(self._schemas.get(self._function), key)
        self._writer.arguments((", " if self._has_parameters else "") + json.dumps(key, ensure_ascii=False) + ": ")
        if self._is_text:
            self._writer.arguments('"')
        self._has_parameters, self._at_start, self._value = True, True, ""
        self._state = self._in_value
        return True

    @property
    def _is_text(self) -> bool:
        """Whether the value must be a text, which streams."""
        return self._types <= {"string"}

    def _in_value(self) -> bool:
        if self._at_start:
            self._at_start = False
            self._buffer = self._buffer.removeprefix("\n")
        text, marker, self._buffer = split_at_marker(self._buffer, _VALUE_ENDS)
        if text.endswith("\n"):
            text = text[:-1]
            self._buffer = self._buffer if marker else "\n" + self._buffer
        if self._is_text:
            self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text
        if marker:
            self._end_value()
            self._buffer = self._buffer if marker == _END_PARAMETER else marker + self._buffer
            self._state = self._between
        return bool(marker)

    def _end_value(self) -> None:
        self._writer.arguments('"' if self._is_text else as_json_of_type(self._value, self._types))

    def _end_function(self) -> None:
        self._writer.arguments("}")
        self._writer.drop_space()

    def _after_function(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, [_END_CALL, *self.starts])
        self._writer.content(text)
        if not marker:
            return False
        self._state = self._text
        return True if marker == _END_CALL else self._started(marker)

    def _end(self) -> None:
        ends = {
            self._in_value: ("\n", *_VALUE_ENDS, *(f"\n{end}" for end in _VALUE_ENDS)),
            self._between: (_PARAMETER, _END_FUNCTION, _END_CALL),
            self._key: (self._buffer,),
            self._after_function: (_END_CALL,),
        }
        if any(end.startswith(self._buffer) for end in ends.get(self._state, ())):
            self._buffer = ""  # the text ended within a tag
        super()._end()
