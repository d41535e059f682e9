"""Calls as DeepSeek's models write them, V3 and R1 with a fence around the arguments, V3.1 and later without."""

from __future__ import annotations

from specdec.gateway.chat.deltas import may_become, split_at_marker
from specdec.gateway.chat.tool_calls.parts.call_object import MOST_NAME_CHARS
from specdec.gateway.chat.tool_calls.parts.named_calls import SectionParser

_CALLS_START = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_START = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"
_FENCE = "```json"


class DeepSeekParser(SectionParser):
    """<call begin>function<sep>name, a fence, {...}, a fence<call end>, or <call begin>name<sep>{...}<call end>."""

    starts = (_CALLS_START, _START)
    section = (_CALLS_START, _CALLS_END)
    call_start = _START
    ends = (_END,)

    def __init__(self) -> None:
        super().__init__()
        self._name = ""

    def _head(self) -> bool:
        before, marker, rest = split_at_marker(self._buffer, [_SEPARATOR])
        if len(before) > MOST_NAME_CHARS or (marker and not before.strip()):
            return self._no_call()
        if not marker:
            return False
        self._name = before.strip()
        self._hold(len(self._buffer) - len(rest))
        self._state = self._after_separator
        return True

    def _after_separator(self) -> bool:
        if self._buffer[0] == "{":
            return self._begin_arguments(self._name)
        if self._name != "function":
            if not self._hold_space():
                return False
            return self._begin_arguments(self._name) if self._buffer[0] == "{" else self._no_call()
        name, line_end, _ = split_at_marker(self._buffer, ["\n"])
        if len(name) > MOST_NAME_CHARS or (line_end and not name.strip()):
            return self._no_call()
        if not line_end:
            return False
        self._name = name.strip()
        self._hold(len(name) + 1)
        self._state = self._fence
        return True

    def _fence(self) -> bool:
        if not self._hold_space() or may_become(self._buffer, _FENCE):
            return False
        if self._buffer.startswith(_FENCE):
            self._hold(len(_FENCE))
            return True
        return self._begin_arguments(self._name) if self._buffer[0] == "{" else self._no_call()

    def _after_arguments(self) -> bool:
        before, marker, rest = split_at_marker(self._buffer, [_END, _CALLS_END])
        num_layout = len(before) - len(before.lstrip(" \t\r\n`"))
        if num_layout < len(before):
            self._take(num_layout)
            return self._no_call()
        if not marker:
            return False
        self._buffer = rest
        self._state = self._between if marker == _END else self._text
        return True

    def _end(self) -> None:
        if self._state == self._after_arguments:
            rest = self._buffer.lstrip(" \t\r\n`")
            if _END.startswith(rest):
                self._buffer = ""  # the text ended within the marker
        super()._end()
