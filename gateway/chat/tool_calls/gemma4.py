"""Calls as Gemma 4 writes them: <|tool_call>call:f{a:<|"|>text<|"|>,b:[1,true]}<tool_call|>"""

from __future__ import annotations

import json
import re

from specdec.gateway.chat.deltas import split_at_marker
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.parts.call_object import MOST_NAME_CHARS

_START = "<|tool_call>"
_END = "<tool_call|>"
_CALL = "call:"
_QUOTE = '<|"|>'
_NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*")
_KEY = re.compile(r"[^,:{}\[\]<\"]*")
_WORD = re.compile(r"[^,{}\[\]<\"]*")
_LITERALS = frozenset({"true", "false", "null"})
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}
_MOST_WORD_CHARS = 4096
"""Characters of a key or of a number, at most; they are held until they end."""


class Gemma4Parser(BufferedParser):
    """Keys stand bare, texts between quotes of their own. Arguments are emitted as JSON as they come.

    A word that is no number and no literal is told as a text. A call with brackets that do not match ends there.
    """

    starts = (_START,)

    def __init__(self) -> None:
        super().__init__()
        self._closing: list[str] = []
        self._has_comma = False
        """A comma waits for the item behind it."""
        self._is_key = False
        self._quote = _QUOTE

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._state = self._head
        return True

    def _head(self) -> bool:
        head, bracket, _ = split_at_marker(self._buffer, ["{"])
        bare = head.lstrip()
        if bare and not bare.startswith(_CALL[: len(bare)]):
            return self._no_call()
        found = _NAME.fullmatch(bare[len(_CALL) :])
        if len(head) > MOST_NAME_CHARS or (bracket and found is None):
            return self._no_call()
        if not bracket or found is None:
            return False
        self._take(len(head) + 1)
        self._raw = ""
        self._writer.begin_call(found[1])
        self._writer.arguments("{")
        self._closing, self._is_key, self._has_comma = ["}"], True, False
        self._state = self._value
        return True

    def _value(self) -> bool:
        """The state before a key, a value or a bracket."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer or _QUOTE.startswith(self._buffer):
            return False
        character = self._buffer[0]
        if self._buffer.startswith(_QUOTE) or character == '"':
            self._quote = _QUOTE if character == "<" else '"'
            self._take(len(self._quote))
            self._item('"')
            self._state = self._in_text
        elif character in _CLOSING and not self._is_key:
            self._closing.append(_CLOSING[character])
            self._is_key = character == "{"
            self._item(self._take(1))
        elif character == self._closing[-1]:
            self._close()
        elif character == ",":
            self._take(1)
            self._has_comma, self._is_key = True, self._closing[-1] == "}"
        elif character == ":":
            self._take(1)
            self._is_key = False
            self._writer.arguments(": ")
        elif character in "{}[]<":
            self._state = self._after_call
        else:
            return self._word()
        return True

    def _item(self, text: str) -> None:
        """Emit the start of a key or a value, behind the comma that waits for it."""
        self._writer.arguments(f", {text}" if self._has_comma else text)
        self._has_comma = False

    def _close(self) -> None:
        self._has_comma = False
        self._writer.arguments(self._take(1))
        self._closing.pop()
        self._is_key = False
        if not self._closing:
            self._state = self._after_call

    def _word(self) -> bool:
        word = (_KEY if self._is_key else _WORD).match(self._buffer)
        length = 0 if word is None else word.end()
        if length == len(self._buffer) and length <= _MOST_WORD_CHARS:
            return False
        text = self._take(max(1, min(length, _MOST_WORD_CHARS))).rstrip()
        is_bare = not self._is_key and (text in _LITERALS or _NUMBER.fullmatch(text))
        self._item(text if is_bare else json.dumps(text, ensure_ascii=False))
        return True

    def _in_text(self) -> bool:
        text, quote, self._buffer = split_at_marker(self._buffer, [self._quote])
        self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if not quote:
            return False
        self._writer.arguments('"')
        self._state = self._value
        return True

    def _after_call(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, [_END, _START])
        self._writer.content(text)
        if not marker:
            return False
        self._state = self._text
        return True if marker == _END else self._started(marker)

    def _end(self) -> None:
        if self._state == self._after_call and _END.startswith(self._buffer):
            self._buffer = ""  # the text ended within the marker
        if self._state in (self._value, self._in_text):
            self._buffer = ""  # a word that may go on
        super()._end()
