"""Messages as gpt-oss writes them (harmony), of parts such as <|channel|>final<|message|>Paris.<|end|>"""

from __future__ import annotations

import re

from specdec.gateway.chat.deltas import split_at_marker
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.parts.call_object import MOST_NAME_CHARS
from specdec.gateway.chat.tool_calls.parts.json_scan import JsonScan

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
_MOST_HEADER_CHARS = 4 * MOST_NAME_CHARS
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


class HarmonyParser(BufferedParser):
    """A message of several parts, each with a channel and perhaps a recipient.

    The channel analysis is reasoning. A part for a function is a call, whose arguments stream. Other parts
    are content: the final answer, and comments before calls. A line break separates two parts of one kind. A part for
    a tool that is no function of the request follows its channel.
    """

    starts = (_START, _CHANNEL, _MESSAGE)

    def __init__(self, *, tells_calls: bool = True) -> None:
        """`tells_calls`: False treats parts for functions as content."""
        super().__init__()
        self._tells_calls = tells_calls
        self._kind = ""
        self._scan = JsonScan()
        self._is_first = True
        """No text of the part was emitted."""
        self._told: set[str] = set()
        """Kinds of the parts so far."""

    def _begin(self) -> bool:
        # If the prompt ends with <|start|>assistant, only a recipient may come before the channel.
        if " to=".startswith(self._buffer[:4]):
            if len(self._buffer) < 4:
                return False
            self._state = self._header
        else:
            self._state = self._text
        return True

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._state = self._header
        if marker == _MESSAGE:
            self._begin_part("")
        return True

    def _header(self) -> bool:
        text, marker, rest = split_at_marker(self._buffer, [_MESSAGE, "<|end|>", "<|return|>", "<|call|>", _START])
        if len(self._raw) + len(text) > _MOST_HEADER_CHARS or (marker and marker != _MESSAGE):
            return self._no_call()
        if not marker:
            return False
        header, self._buffer = self._raw + text, rest
        self._begin_part(header)
        return True

    def _begin_part(self, header: str) -> None:
        self._raw = ""
        self._is_first = True
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        function = recipient[1].removeprefix(_FUNCTIONS) if recipient and recipient[1].startswith(_FUNCTIONS) else ""
        if self._tells_calls and 0 < len(function) <= MOST_NAME_CHARS:
            self._kind, self._scan = "call", JsonScan()
            self._writer.begin_call(function)
        else:
            self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        self._state = self._body

    def _body(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, _BODY_ENDS)
        self._tell(text)
        if not marker:
            return False
        if self._kind == "call" and self._is_first:
            self._writer.arguments("{}")
        if marker in self.starts:
            return self._started(marker)
        self._state = self._text
        return True

    def _tell(self, text: str) -> None:
        if self._kind == "call" and self._is_first:
            text = text.lstrip()
        if not text:
            return
        if self._is_first and self._kind in self._told:
            text = "\n" + text
        self._is_first = False
        if self._kind == "call":
            end = self._scan.feed(text)
            self._writer.arguments(self._scan.take() + text[end:])
            return
        self._told.add(self._kind)
        if self._kind == "reasoning":
            self._writer.reasoning(text)
        else:
            self._writer.content(text)

    def _end(self) -> None:
        if self._state == self._body:
            held, self._buffer = self._buffer, ""
            if self._kind != "call":
                self._tell(held)
        super()._end()
