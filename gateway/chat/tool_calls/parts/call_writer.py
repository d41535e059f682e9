"""Collect the output of parsers: content, and calls with their arguments in pieces."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from specdec.gateway.chat.deltas import MessageDelta, ToolCallDelta

_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """A random id of nine letters and digits, the only form that templates of Mistral's models accept."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class CallWriter:
    """Collects deltas. White space of the content beside a call is layout and dropped."""

    def __init__(self, make_id: Callable[[], str] = new_call_id) -> None:
        self._make_id = make_id
        self._deltas: list[MessageDelta] = []
        self._space: list[str] = []
        self._index = -1
        self._after_call = False

    def content(self, text: str) -> None:
        """Add content. White space at its end waits for the next text."""
        told = text.rstrip()
        if told:
            self._after_call = False
            self._deltas.append(MessageDelta(content="".join([*self._space, told])))
            self._space = []
        if len(told) < len(text):
            self._space.append(text[len(told) :])

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._deltas.append(MessageDelta(reasoning=text))

    def begin_call(self, name: str, id: str = "") -> None:
        """Begin a call of a function; its arguments follow. `id` is the model's own, if it has one."""
        self._space = []
        self._after_call = True
        self._index += 1
        self._deltas.append(MessageDelta(tool_call=ToolCallDelta(self._index, id=id or self._make_id(), name=name)))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if text:
            self._deltas.append(MessageDelta(tool_call=ToolCallDelta(self._index, arguments=text)))

    def drop_space(self) -> None:
        """Drop the waiting white space, which is layout."""
        self._space = []

    def take(self) -> list[MessageDelta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> None:
        """End the message: waiting white space is content, unless it follows a call."""
        if self._space and not self._after_call:
            self._deltas.append(MessageDelta(content="".join(self._space)))
        self._space = []
