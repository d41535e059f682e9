"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, among other text."""

from __future__ import annotations

from specdec.gateway.chat.deltas import split_at_marker
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.parts.call_object import CallObject

_START = "<tool_call>"
_END = "</tool_call>"


class TaggedParser(BufferedParser):
    """Each call stands between two tags."""

    starts = (_START,)
    end = _END

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._object = CallObject(self._writer)
        self._state = self._call
        return True

    def _call(self) -> bool:
        return self._object is not None and self._read_object(self._object, self._after_call, self._spoilt)

    def _after_call(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, [_END, _START])
        self._writer.content(text)
        return self._ended(marker) if marker else False

    def _spoilt(self) -> bool:
        return self._read_spoilt([_END], self._ended)

    def _ended(self, marker: str) -> bool:
        if marker == _START:
            return self._started(marker)
        self._state = self._text
        return True

    def _end(self) -> None:
        if self._state == self._after_call and _END.startswith(self._buffer):
            self._buffer = ""  # the text ended within the tag
        super()._end()
