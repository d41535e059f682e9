"""Calls as Llama 3.2 and Llama 4 write them: the whole message is [f(a=1), g(b="x")], in Python."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from specdec.gateway.chat.deltas import may_become
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.parts.call_object import MOST_NAME_CHARS

_START = "<|python_start|>"
_END = "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*(.*)", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MOST_ARGUMENT_CHARS = 1 << 16
"""Characters of one argument, at most: Python's parser reads it as a whole, and takes memory."""


class PythonicParser(BufferedParser):
    """Emits each argument as JSON at its end. Arguments have names and literal values."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._is_told = False
        self._has_arguments = False
        self._num_seen = 0
        self._closing: list[str] = []
        self._quote = ""
        self._escaped = False

    def _begin(self) -> bool:
        if not self._hold_space() or may_become(self._buffer, _START):
            return False
        if self._buffer.startswith(_START):
            self._hold(len(_START))
            return True
        if self._buffer[0] != "[":
            return self._no_call()
        self._hold(1)
        self._state = self._call_start
        return True

    def _call_start(self) -> bool:
        if not self._hold_space():
            return False
        name, bracket, _ = self._buffer.partition("(")
        if len(name) > MOST_NAME_CHARS or not (_NAME.fullmatch(name.rstrip()) or (not bracket and not name)):
            return self._no_call()
        if not bracket:
            return False
        self._name = name.strip()
        self._is_told = self._has_arguments = False
        self._hold(len(name) + 1)
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """Look for the comma or bracket that ends the argument; each character is read once."""
        most = min(len(self._buffer), _MOST_ARGUMENT_CHARS)
        for at in range(self._num_seen, most):
            character = self._buffer[at]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in _CLOSING:
                self._closing.append(_CLOSING[character])
            elif self._closing:
                if character == self._closing[-1]:
                    self._closing.pop()
            elif character in ",)":
                self._num_seen = 0
                return self._end_argument(at, character)
        self._num_seen = most
        return most == _MOST_ARGUMENT_CHARS and self._no_call()

    def _end_argument(self, at: int, end: str) -> bool:
        text = self._buffer[:at]
        if text.strip():
            told = _as_json(text)
            if told is None:
                return self._no_call()
            self._tell()
            self._writer.arguments((", " if self._has_arguments else "{") + told)
            self._has_arguments = True
        elif end == ",":
            return self._no_call()
        self._take(at + 1)
        if end == ")":
            self._tell()
            self._writer.arguments("}" if self._has_arguments else "{}")
            self._state = self._after_call
        return True

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._raw = ""
            self._writer.begin_call(self._name)

    def _after_call(self) -> bool:
        if not self._hold_space():
            return False
        if self._buffer[0] == ",":
            self._hold(1)
            self._state = self._call_start
            return True
        if self._buffer[0] == "]":
            self._take(1)
            self._raw = ""
            self._state = self._after_list
            return True
        return self._no_call()

    def _after_list(self) -> bool:
        if may_become(self._buffer, _END):
            return False
        if self._buffer.startswith(_END):
            self._take(len(_END))
        self._state = self._text
        return True


def _as_json(text: str) -> str | None:
    """An argument as JSON, "name": value; None if it is malformed."""
    match = _ARGUMENT.fullmatch(text)
    if match is None:
        return None
    try:
        value = _literal(ast.parse(match[2].strip(), mode="eval").body)
        return f"{json.dumps(match[1])}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal; JSON's true, false and null count, too. Raises ValueError for other code."""
    match node:
        case ast.Constant(value=str() as text):
            # JSON's escapes write surrogate pairs; half a pair raises.
            return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
        case ast.Constant(value=int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            named = [(_literal(key), value) for key, value in zip(keys, values, strict=True) if key is not None]
            if len(named) != len(values) or not all(isinstance(name, str) for name, _ in named):
                raise ValueError("the keys of an object are texts")
            return {name: _literal(value) for name, value in named}
        case _:
            raise ValueError("not a literal")
