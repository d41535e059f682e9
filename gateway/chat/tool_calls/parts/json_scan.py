"""Find the end of a JSON value in streamed text, and mend its strings. Each character is read once."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r"[^\"{}\[\]]*")
_IN_STRING = re.compile(r"[^\"\\\x00-\x1f]*")
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_ESCAPE_START = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[^\s,:{}\[\]\"]*")


class Scan(Enum):
    """State of a value."""

    OPEN = auto()
    """The value goes on."""
    DONE = auto()
    BROKEN = auto()
    """The text is no JSON: brackets do not match, or no value starts so."""


class JsonScan:
    """Follows one value by brackets and strings only: {"a": tru} counts as whole.

    Models write line breaks and other control characters in strings, and backslashes that begin no escape. What is
    written has escapes for them, as JSON demands.
    """

    def __init__(self) -> None:
        self.state = Scan.OPEN
        self._closing: list[str] = []
        self._in_string = False
        self._escape = ""
        """The escape that the text so far ends with."""
        self._in_scalar = False
        self._written: list[str] = []

    def feed(self, text: str, start: int = 0) -> int:
        """Read a text from `start` on; returns the index where the value ends or breaks, or the text's end."""
        at = start
        while at < len(text) and self.state is Scan.OPEN:
            before = at
            if self._in_string:
                at = self._go_on_in_string(text, at)
                continue
            if self._in_scalar:
                at = self._skip(_SCALAR, text, at)
                if at < len(text):
                    self.state = Scan.DONE
            else:
                at = self._go_on(text, at)
            self._written.append(text[before:at])
        return at

    def take(self) -> str:
        """What was read since the last call, as it is written in JSON."""
        written, self._written = "".join(self._written), []
        return written

    def _go_on(self, text: str, at: int) -> int:
        if self._closing:
            at = self._skip(_PLAIN, text, at)
            if at == len(text):
                return at
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif self._closing:
            if character != self._closing.pop():
                self.state = Scan.BROKEN
                return at
            if not self._closing:
                self.state = Scan.DONE
        elif character.isalnum() or character == "-":
            self._in_scalar = True
        else:
            self.state = Scan.BROKEN
            return at
        return at + 1

    def _go_on_in_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._go_on_in_escape(text, at)
        end = self._skip(_IN_STRING, text, at)
        self._written.append(text[at:end])
        if end == len(text):
            return end
        character = text[end]
        if character == "\\":
            self._escape = character
        elif character == '"':
            self._written.append(character)
            self._in_string = False
            if not self._closing:
                self.state = Scan.DONE
        else:
            self._written.append(json.dumps(character)[1:-1])
        return end + 1

    def _go_on_in_escape(self, text: str, at: int) -> int:
        longer = self._escape + text[at]
        if _ESCAPE.fullmatch(longer):
            self._written.append(longer)
            self._escape = ""
        elif _ESCAPE_START.fullmatch(longer):
            self._escape = longer
        else:  # a backslash of the text, and no escape
            self._written.append("\\" + self._escape)
            self._escape = ""
            return at
        return at + 1

    @staticmethod
    def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
        match = pattern.match(text, at)
        return match.end() if match else at


def skip_space(text: str, at: int) -> int:
    """Index of the next character that is no white space."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
