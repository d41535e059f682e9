"""A call that is written as a JSON object with a name and arguments, read while it comes."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any

from specdec.gateway.chat.tool_calls.call_writer import CallWriter
from specdec.gateway.chat.tool_calls.json_scan import JsonScan, Scan, skip_space

MOST_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *_ARGUMENTS)
"""Before a call is told, any other key says that the object is none."""


class _At(Enum):
    BRACE = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class CallObject:
    """Reads one object {"name": ..., "arguments": ...}, whatever the order of its keys.

    The call is told when its name and the start of its arguments are known; before that nothing is, so that what turns
    out to be no call can be content: `text` has all of it. Arguments stream as they are written. Those that are a text
    with JSON in it are told when they end, without the quotes.
    """

    def __init__(self, writer: CallWriter, *, needs_arguments: bool = False) -> None:
        """`needs_arguments`: without them an object is no call, else it is a call with none."""
        self._writer = writer
        self._needs_arguments = needs_arguments
        self._at = _At.BRACE
        self._scan: JsonScan | None = None
        self._key = ""
        self._value = ""
        self._name = ""
        self._early: str | None = None
        self._has_arguments = False
        self._num_given = 0
        self.state = Scan.OPEN
        self.is_told = False
        """The call has begun for the reader."""
        self.text = ""
        """All of the object so far, until the call is told."""

    def feed(self, text: str) -> int:
        """Read on; returns how much of the text belongs to the object."""
        at = 0
        while self.state is Scan.OPEN and at < len(text):
            at = self._punctuation(text, at) if self._scan is None else self._read(self._scan, text, at)
        if not self.is_told:
            self.text += text[:at]
        return at

    def finish(self) -> None:
        """The text has ended within the object. What of the arguments waited for more is told as it stands."""
        if self.is_told and self._is_arguments():
            self._writer.arguments(self._value)

    def _punctuation(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        character = text[at]
        match self._at:
            case _At.BRACE if character == "{":
                self._at = _At.KEY_OR_END
            case _At.KEY_OR_END | _At.COMMA_OR_END if character == "}":
                self._end()
            case _At.KEY_OR_END | _At.KEY if character == '"':
                self._at, self._scan, self._value = _At.KEY, JsonScan(), ""
                return at
            case _At.COLON if character == ":":
                self._at = _At.VALUE
            case _At.COMMA_OR_END if character == ",":
                self._at = _At.KEY
            case _At.VALUE:
                self._scan, self._value = JsonScan(), ""
                return at
            case _:
                self.state = Scan.BROKEN
                return at
        return at + 1

    def _read(self, scan: JsonScan, text: str, at: int) -> int:
        """Go on with a key or a value."""
        end = scan.feed(text, at)
        if self._at is _At.KEY or self._key == "name" or self._is_arguments():
            self._value += text[at:end]
        if self._is_arguments() and self._streams():
            self._give(self._value)
            self._num_given += len(self._value)
            self._value = ""
        if scan.state is Scan.DONE:
            self._scan = None
            if self._at is _At.KEY:
                self._end_key()
            else:
                self._end_value()
        elif scan.state is Scan.BROKEN:
            self.state = Scan.BROKEN
        return end

    def _is_arguments(self) -> bool:
        return self._at is _At.VALUE and self._key in _ARGUMENTS and not self._has_arguments

    def _streams(self) -> bool:
        """Whether the value is told as it comes: a text, or a word, may have to be told otherwise."""
        return self._num_given > 0 or self._value[:1] in ("{", "[")

    def _end_key(self) -> None:
        self._key = str(_decoded(self._value))
        self._at = _At.COLON
        if not self.is_told and self._key not in _KEYS:
            self.state = Scan.BROKEN

    def _end_value(self) -> None:
        if self._is_arguments():
            if not self._streams():
                self._give(_unquoted(self._value))
            self._has_arguments = True
        elif self._key == "name" and not self._name:
            name = _decoded(self._value)
            if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME_CHARS:
                self.state = Scan.BROKEN
                return
            self._name = name
            if self._early is not None:
                self._give("")
        self._at = _At.COMMA_OR_END

    def _give(self, arguments: str) -> None:
        """Tell a piece of the arguments, or keep it while the name is not known."""
        if not self._name:
            self._early = (self._early or "") + arguments
            return
        self._tell()
        self._writer.arguments((self._early or "") + arguments)
        self._early = None

    def _tell(self) -> None:
        if not self.is_told:
            self.is_told = True
            self.text = ""
            self._writer.begin_call(self._name)

    def _end(self) -> None:
        if not self._name or (self._needs_arguments and not self._has_arguments):
            self.state = Scan.BROKEN
            return
        if not self._has_arguments:
            self._tell()
            self._writer.arguments("{}")
        self.state = Scan.DONE


def _decoded(text: str) -> Any:
    """The value of a JSON text; None where it is none, or has half of a surrogate pair as a text."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return value


def _unquoted(text: str) -> str:
    """Arguments that are a text with an object in it, without the quotes; null is an object with nothing in it."""
    value = _decoded(text)
    if value is None and text == "null":
        return "{}"
    return value if isinstance(value, str) and isinstance(_decoded(value), dict) else text
