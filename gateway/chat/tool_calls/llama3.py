"""Calls as Llama 3 writes them: the whole message is {"name": ..., "parameters": {...}}, or several of them."""

from __future__ import annotations

from gateway.chat.markers import may_become, split_at_marker
from gateway.chat.tool_calls.buffered import BufferedParser
from gateway.chat.tool_calls.call_object import CallObject

_START = "<|python_tag|>"


class Llama3JsonParser(BufferedParser):
    """Objects at the start of the message or after the tag, with ; or , between them, or in a list."""

    def __init__(self) -> None:
        super().__init__()
        self._in_list = False

    def _begin(self) -> bool:
        self._hold(len(self._buffer) - len(self._buffer.lstrip()))
        if not self._buffer or may_become(self._buffer, _START):
            return False
        if self._buffer.startswith(_START):
            self._hold(len(_START))
        self._state = self._item
        return True

    def _text(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, [_START])
        self._writer.content(text)
        if not marker:
            return False
        return self._started(marker)

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._in_list = False
        self._state = self._item
        return True

    def _item(self) -> bool:
        self._hold(len(self._buffer) - len(self._buffer.lstrip()))
        if not self._buffer:
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
        self._hold(len(self._buffer) - len(self._buffer.lstrip()))
        if not self._buffer or may_become(self._buffer, _START):
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

    def _no_call(self) -> bool:
        self._give_up()
        self._state = self._text
        return True
