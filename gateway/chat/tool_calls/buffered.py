"""What parsers of tool calls have in common: text that waits to be understood, and a state that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from specdec.gateway.chat.deltas import MessageDelta, split_at_marker
from specdec.gateway.chat.tool_calls.call_object import CallObject
from specdec.gateway.chat.tool_calls.call_writer import CallWriter
from specdec.gateway.chat.tool_calls.json_scan import JsonScan, Scan


class BufferedParser:
    """A parser as a machine of states. A state takes from `_buffer` and says whether to go on at once."""

    starts: ClassVar[tuple[str, ...]] = ()
    """What begins a call among content."""

    def __init__(self) -> None:
        self._writer = CallWriter()
        self._buffer = ""
        self._raw = ""
        """What was taken for the start of a call that is not told yet: content, if it turns out to be none."""
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
        """The state in content, up to what begins a call."""
        text, marker, self._buffer = split_at_marker(self._buffer, self.starts)
        self._writer.content(text)
        return self._started(marker) if marker else False

    def _started(self, marker: str) -> bool:
        """What begins a call has been taken from the content."""
        raise NotImplementedError

    def _no_call(self) -> bool:
        """Go on in content, of which what was held is a part."""
        self._give_up()
        self._state = self._text
        return True

    def _end(self) -> None:
        """Tell what is left when the text has ended."""
        if self._object is not None:
            self._object.finish()
        self._give_up()
        self._writer.content(self._take(len(self._buffer)))

    def _take(self, num_chars: int) -> str:
        """The first characters of the buffer, taken out of it."""
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return taken

    def _hold(self, num_chars: int) -> None:
        """Take the first characters of the buffer for the start of a call."""
        self._raw += self._take(num_chars)

    def _hold_space(self) -> bool:
        """Hold the white space that comes next; whether anything comes after it."""
        self._hold(len(self._buffer) - len(self._buffer.lstrip()))
        return bool(self._buffer)

    def _give_up(self) -> None:
        """What was held is content after all."""
        if self._object is not None and not self._object.is_told:
            self._raw += self._object.text
        self._object = None
        self._writer.content(self._raw)
        self._raw = ""

    def _read_object(self, call: CallObject, then: Callable[[], bool], when_spoilt: Callable[[], bool]) -> bool:
        """Read on in a call. Goes to `then` at its end, to content where it is no call, or to `when_spoilt`."""
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
        """Read on in the arguments of a call that is told. Goes to `then` at their end, or to `when_spoilt`."""
        self._writer.arguments(self._take(scan.feed(self._buffer)))
        if scan.state is Scan.OPEN:
            return False
        self._state = then if scan.state is Scan.DONE else when_spoilt
        return True

    def _read_spoilt(self, ends: Sequence[str], then: Callable[[str], bool]) -> bool:
        """Arguments that are no JSON, as they are written, up to one of some markers, which goes to `then`."""
        text, marker, self._buffer = split_at_marker(self._buffer, ends)
        self._writer.arguments(text)
        return then(marker) if marker else False
