"""Find the end of a JSON value in streamed text. Each character is read once."""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r"[^\"{}\[\]]*")
_IN_STRING = re.compile(r"[^\"\\]*")
_SCALAR = re.compile(r"[^\s,:{}\[\]\"]*")


class Scan(Enum):
    """State of a value."""

    OPEN = auto()
    """The value goes on."""
    DONE = auto()
    BROKEN = auto()
    """The text is no JSON: brackets do not match, or no value starts so."""


class JsonScan:
    """Follows one value by brackets and strings only: {"a": tru} counts as whole."""

    def __init__(self) -> None:
        self.state = Scan.OPEN
        self._closing: list[str] = []
        self._in_string = False
        self._escaped = False
        self._in_scalar = False

    def feed(self, text: str, start: int = 0) -> int:
        """Read a text from `start` on; returns the index where the value ends or breaks, or the text's end."""
        at = start
        while at < len(text) and self.state is Scan.OPEN:
            if self._in_string:
                at = self._go_on_in_string(text, at)
            elif self._in_scalar:
                at = self._skip(_SCALAR, text, at)
                if at < len(text):
                    self.state = Scan.DONE
            else:
                at = self._go_on(text, at)
        return at

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
        if self._escaped:
            self._escaped = False
            return at + 1
        at = self._skip(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            if not self._closing:
                self.state = Scan.DONE
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
