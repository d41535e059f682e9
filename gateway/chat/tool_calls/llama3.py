"""Calls as Llama 3 writes them: the whole message is {"name": ..., "parameters": {...}}, or several of them."""

from __future__ import annotations

from specdec.gateway.chat.deltas import may_become
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.parts.call_object import CallObject

_START = "<|python_tag|>"


class Llama3JsonParser(BufferedParser):
    """Objects at the start of the message or after the tag, with ; or , between them, or in a list."""

    starts = (_START,)

    def __init__(self) -> None:
        super().__init__()
        self._in_list = False

    def _begin(self) -> bool:
        if not self._hold_space() or may_become(self._buffer, _START):
            return False
        if self._buffer.startswith(_START):
            self._hold(len(_START))
        self._state = self._item
        return True

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._in_list = False
        self._state = self._item
        return True

    def _item(self) -> bool:
        if not self._hold_space():
            return False
        if self._buffer[0] == "[" and not self._in_list:
            self._in_list = True
            self._hold(1)
            return True
        if self._buffer[0] != "{":
            return self._no_call()
        self._object = CallObject(self._writer, needs_arguments=True)
        self._state = self._in_object
        return True

    def _in_object(self) -> bool:
        return self._object is not None and self._read_object(self._object, self._after_item, self._spoilt)

    def _after_item(self) -> bool:
        if not self._hold_space() or may_become(self._buffer, _START):
            return False
        if self._buffer[0] in ";,":
            self._hold(1)
            self._state = self._item
        elif self._buffer[0] == "{":
            self._state = self._item
        elif self._buffer.startswith(_START):
            self._hold(len(_START))
            self._state = self._item
        elif self._buffer[0] == "]" and self._in_list:
            self._take(1)
            self._raw = ""
            return self._no_call()
        else:
            return self._no_call()
        return True

    def _spoilt(self) -> bool:
        return self._read_spoilt([_START], self._started)
