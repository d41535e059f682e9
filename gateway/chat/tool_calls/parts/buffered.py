"""Base of the parsers of tool calls: a buffer of unread text, and a state that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.gateway.chat.deltas import MessageDelta, split_at_marker
from specdec.gateway.chat.tool_calls.parts.call_object import CallObject
from specdec.gateway.chat.tool_calls.parts.call_writer import CallWriter
from specdec.gateway.chat.tool_calls.parts.json_scan import JsonScan, Scan


class BufferedParser:
    """A state machine. A state takes text from `_buffer` and returns whether to run the next state at once."""

    starts: tuple[str, ...] = ()
    """Markers that begin a call."""

    def __init__(self) -> None:
        self._writer = CallWriter()
        self._buffer = ""
        self._raw = ""
        """Text held as the possible start of a call; it becomes content if no call follows."""
        self._object: CallObject | None = None
        self._state: Callable[[], bool] = self._begin

    def push(self, text: str) -> list[MessageDelta]:
        """See `StreamingParser.push`."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._writer.take()

    def finish(self) -> list[MessageDelta]:
        """See `StreamingParser.finish`."""
        self._end()
        self._writer.finish()
        return self._writer.take()

    def _begin(self) -> bool:
        """The first state."""
        return self._text()

    def _text(self) -> bool:
        """The state in content, up to a marker that begins a call."""
        text, marker, self._buffer = split_at_marker(self._buffer, self.starts)
        self._writer.content(text)
        return self._started(marker) if marker else False

    def _started(self, marker: str) -> bool:
        """A marker that begins a call was taken from the buffer."""
        raise NotImplementedError

    def _no_call(self) -> bool:
        """Return to content, with the held text."""
        self._give_up()
        self._state = self._text
        return True

    def _end(self) -> None:
        """Emit the rest at the end of the text."""
        if self._object is not None:
            self._object.finish()
        self._give_up()
        self._writer.content(self._take(len(self._buffer)))

    def _take(self, num_chars: int) -> str:
        """Take the first characters out of the buffer."""
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return taken

    def _hold(self, num_chars: int) -> None:
        """Hold the first characters of the buffer as the start of a call."""
        self._raw += self._take(num_chars)

    def _hold_space(self) -> bool:
        """Hold leading white space; returns whether text follows."""
        self._hold(len(self._buffer) - len(self._buffer.lstrip()))
        return bool(self._buffer)

    def _give_up(self) -> None:
        """The held text is content after all."""
        if self._object is not None and not self._object.is_told:
            self._raw += self._object.text
        self._object = None
        self._writer.content(self._raw)
        self._raw = ""

    def _read_object(self, call: CallObject, then: Callable[[], bool], when_spoilt: Callable[[], bool]) -> bool:
        """Read more of a call. Next state: `then` at its end, content if it is no call, else `when_spoilt`."""
        self._take(call.feed(self._buffer))
        if call.is_told:
            self._raw = ""
        if call.state is Scan.OPEN:
            return False
        if call.state is Scan.DONE:
            self._object, self._state = None, then
        elif call.is_told:
            self._object, self._state = None, when_spoilt
        else:
            self._no_call()
        return True

    def _read_value(self, scan: JsonScan, then: Callable[[], bool], when_spoilt: Callable[[], bool]) -> bool:
        """Read more arguments of an emitted call. Next state: `then` at their end, or `when_spoilt`."""
        self._take(scan.feed(self._buffer))
        self._writer.arguments(scan.take())
        if scan.state is Scan.OPEN:
            return False
        self._state = then if scan.state is Scan.DONE else when_spoilt
        return True

    def _read_spoilt(self, ends: Sequence[str], then: Callable[[str], bool]) -> bool:
        """Emit arguments that are no JSON unchanged, up to one of the markers, which is passed to `then`."""
        text, marker, self._buffer = split_at_marker(self._buffer, ends)
        self._writer.arguments(text)
        return then(marker) if marker else False
