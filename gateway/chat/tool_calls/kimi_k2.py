"""Calls as Kimi K2 writes them: a section of calls, each with an id that names the function."""

from __future__ import annotations

import re

from specdec.gateway.chat.deltas import may_become, split_at_marker
from specdec.gateway.chat.tool_calls.parts.call_object import MOST_NAME_CHARS
from specdec.gateway.chat.tool_calls.parts.named_calls import SectionParser

_SECTION = "<|tool_calls_section_begin|>"
_END_SECTION = "<|tool_calls_section_end|>"
_START = "<|tool_call_begin|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_END = "<|tool_call_end|>"
_ID = re.compile(r"\s*(?:functions\.)?([^\s:<>{}]+)(?::[0-9]+)?\s*")
_OWN_ID = re.compile(r"functions\.[^\s:<>{}]+:[0-9]+")


class KimiParser(SectionParser):
    """<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, in a section or alone.

    The model's ids are kept, as it expects them beside the results.
    """

    starts = (_SECTION, _START)
    section = (_SECTION, _END_SECTION)
    call_start = _START
    ends = (_END,)

    def __init__(self) -> None:
        super().__init__()
        self._function = ""
        self._id = ""
        self._told: set[str] = set()
        """Ids of the calls so far."""

    def _head(self) -> bool:
        head, marker, rest = split_at_marker(self._buffer, [_ARGUMENTS])
        found = _ID.fullmatch(head)
        if len(head) > MOST_NAME_CHARS or (marker and found is None):
            return self._no_call()
        if not marker or found is None:
            return False
        self._function = found[1]
        own = head.strip()
        self._id = own if _OWN_ID.fullmatch(own) and own not in self._told else ""
        self._hold(len(self._buffer) - len(rest))
        self._state = self._arguments_start
        return True

    def _arguments_start(self) -> bool:
        if not self._hold_space():
            return False
        if self._buffer[0] != "{":
            return self._no_call()
        self._told.add(self._id)
        return self._begin_arguments(self._function, self._id)

    def _after_arguments(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer or may_become(self._buffer, _END):
            return False
        if not self._buffer.startswith(_END):
            return self._no_call()
        self._take(len(_END))
        self._state = self._between
        return True

    def _end(self) -> None:
        if self._state == self._after_arguments or (self._state == self._between and not self._raw.strip()):
            self._buffer = ""  # the text ended within a marker
        super()._end()
