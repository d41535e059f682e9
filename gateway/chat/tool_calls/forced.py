"""Calls that the output was constrained to: a JSON list of them and nothing else."""

from __future__ import annotations

from specdec.gateway.chat.deltas import MessageDelta
from specdec.gateway.chat.tool_calls.llama3 import Llama3JsonParser
from specdec.gateway.chat.tool_calls.parts.call_writer import CallWriter


class ForcedCallsParser:
    """Reads the list. Brackets and names around the arguments are never content, wherever the text ends.

    If only one function can be called, a text that ends before its name is a call without arguments so far.
    """

    def __init__(self, sole_function: str = "") -> None:
        """`sole_function`: the only function that can be called; empty: there are several."""
        self._sole_function = sole_function
        self._list = Llama3JsonParser()
        self._has_text = False
        self._has_call = False

    def push(self, text: str) -> list[MessageDelta]:
        """See `StreamingParser.push`."""
        self._has_text |= bool(text)
        return self._calls(self._list.push(text))

    def finish(self) -> list[MessageDelta]:
        """See `StreamingParser.finish`."""
        told = self._calls(self._list.finish())
        if self._has_text and not self._has_call and self._sole_function:
            writer = CallWriter()
            writer.begin_call(self._sole_function)
            return writer.take()
        return told

    def _calls(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        told = [delta for delta in deltas if delta.tool_call is not None]
        self._has_call |= bool(told)
        return told
