"""Read a call that is a JSON object with a name and arguments, while it streams."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any

from specdec.gateway.chat.tool_calls.parts.call_writer import CallWriter
from specdec.gateway.chat.tool_calls.parts.json_scan import JsonScan, Scan, skip_space

MOST_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *_ARGUMENTS)
"""Keys of a call: any other key, before the call is emitted, shows that the object is no call."""


class _At(Enum):
    BRACE = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class CallObject:
    """Reads one object {"name": ..., "arguments": ...} with its keys in any order.

    The call is emitted when its name and the start of its arguments are known. Until then `text` keeps the object,
    which becomes content if it is no call. Arguments stream as they are written; arguments that are a text with JSON
    in it are emitted at their end, without the quotes.
    """

    def __init__(self, writer: CallWriter, *, needs_arguments: bool = False) -> None:
        """`needs_arguments`: an object without arguments is no call; False: it is a call without arguments."""
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
        """The call was emitted."""
        self.text = ""
        """The object so far, until the call is emitted."""

    def feed(self, text: str) -> int:
        """Read more text; returns how many characters belong to the object."""
        at = 0
        while self.state is Scan.OPEN and at < len(text):
            at = self._punctuation(text, at) if self._scan is None else self._read(self._scan, text, at)
        if not self.is_told:
            self.text += text[:at]
        return at

    def finish(self) -> None:
        """The text has ended within the object: emit the held part of the arguments."""
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
        end, written = scan.feed(text, at), scan.take()
        if self._at is _At.KEY or self._key == "name" or self._is_arguments():
            self._value += written
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
        """Whether the value streams: a text or a word may have to be changed at its end."""
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
        """Emit a piece of the arguments, or keep it until the name is known."""
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
    """The value of a JSON text; None if it is malformed, or a text with half a surrogate pair."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return value


def _unquoted(text: str) -> str:
    """Arguments that are a text with an object in it, unquoted; null becomes an empty object."""
    value = _decoded(text)
    if value is None and text == "null":
        return "{}"
    return value if isinstance(value, str) and isinstance(_decoded(value), dict) else text
