"""Base of the parsers of calls whose function's name stands before the JSON of their arguments."""

from __future__ import annotations

from specdec.gateway.chat.deltas import may_become
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.parts.json_scan import JsonScan


class NamedCallParser(BufferedParser):
    """Reads the arguments of a call that `_begin_arguments` began. A subclass says what follows them."""

    ends: tuple[str, ...] = ()
    """Markers that end arguments which are no JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._scan = JsonScan()

    def _begin_arguments(self, function: str, call_id: str = "") -> bool:
        """Emit the start of a call, whose arguments follow in the buffer."""
        self._raw = ""
        self._writer.begin_call(function, call_id)
        self._scan = JsonScan()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        return self._read_value(self._scan, self._after_arguments, self._spoilt)

    def _after_arguments(self) -> bool:
        """The state behind the arguments."""
        raise NotImplementedError

    def _spoilt(self) -> bool:
        return self._read_spoilt(self.ends, self._after_spoilt)

    def _after_spoilt(self, marker: str) -> bool:
        """One of `ends` was taken from the buffer."""
        raise NotImplementedError


class SectionParser(NamedCallParser):
    """Calls of which each has its markers, in a section with markers of its own or alone."""

    section = ("", "")
    """Markers around a section."""
    call_start = ""
    """Marker of each call's start; `ends` has the marker of its end."""

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._state = self._between if marker == self.section[0] else self._head
        return True

    def _between(self) -> bool:
        """The state before and between the calls of a section."""
        section_end = self.section[1]
        if not self._hold_space() or may_become(self._buffer, self.call_start) or may_become(self._buffer, section_end):
            return False
        if self._buffer.startswith(self.call_start):
            self._hold(len(self.call_start))
            self._state = self._head
            return True
        if self._buffer.startswith(section_end):
            self._take(len(section_end))
            self._raw = ""
        return self._no_call()

    def _head(self) -> bool:
        """The state behind a call's start."""
        raise NotImplementedError

    def _after_spoilt(self, marker: str) -> bool:
        self._state = self._between
        return bool(marker)
