"""Calls as Mistral's models write them: [TOOL_CALLS] with a list of objects, or with one name and arguments per
call."""

from __future__ import annotations

import re

from specdec.gateway.chat.deltas import split_at_marker
from specdec.gateway.chat.tool_calls.parts.call_object import MOST_NAME_CHARS, CallObject
from specdec.gateway.chat.tool_calls.parts.named_calls import NamedCallParser

_START = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"\s*[A-Za-z0-9_.:/-]*\s*")
_MOST_HELD_CHARS = 2 * MOST_NAME_CHARS


class MistralParser(NamedCallParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...} or [TOOL_CALLS]name{...}."""

    starts = (_START,)
    ends = (_START,)

    def __init__(self) -> None:
        super().__init__()
        self._name = ""

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._state = self._call_start
        return True

    def _call_start(self) -> bool:
        if not self._hold_space():
            return False
        if self._buffer[0] == "[" and not self._buffer.startswith(_CALL_ID):
            self._hold(1)
            self._state = self._item
        elif self._buffer[0] == "{":
            self._state = self._item
        else:
            self._state = self._name_of_call
        return True

    def _item(self) -> bool:
        if not self._hold_space():
            return False
        if self._buffer[0] != "{":
            return self._no_call()
        self._object = CallObject(self._writer)
        self._state = self._in_object
        return True

    def _in_object(self) -> bool:
        return self._object is not None and self._read_object(self._object, self._after_item, self._spoilt)

    def _after_item(self) -> bool:
        if not self._hold_space():
            return False
        if self._buffer[0] == ",":
            self._hold(1)
            self._state = self._item
            return True
        if self._buffer[0] == "]":
            self._take(1)
            self._raw = ""
        return self._no_call()

    def _name_of_call(self) -> bool:
        before, marker, rest = split_at_marker(self._buffer, [_ARGUMENTS, _CALL_ID, "{"])
        named = _NAME.fullmatch(before)
        if named is None or len(before) > _MOST_HELD_CHARS or (marker and not before.strip()):
            return self._no_call()
        if not marker:
            return False
        self._name = before.strip()
        self._hold(len(self._buffer) - len(rest) - (len(marker) if marker == "{" else 0))
        self._state = self._call_id if marker == _CALL_ID else self._arguments_start
        return True

    def _call_id(self) -> bool:
        before, marker, rest = split_at_marker(self._buffer, [_ARGUMENTS])
        if len(before) > _MOST_HELD_CHARS:
            return self._no_call()
        if not marker:
            return False
        self._hold(len(self._buffer) - len(rest))
        self._state = self._arguments_start
        return True

    def _arguments_start(self) -> bool:
        if not self._hold_space():
            return False
        if self._buffer[0] != "{":
            return self._no_call()
        return self._begin_arguments(self._name)

    def _after_arguments(self) -> bool:
        self._state = self._text
        return True

    def _after_spoilt(self, marker: str) -> bool:
        return self._started(marker)
