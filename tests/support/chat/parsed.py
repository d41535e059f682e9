"""Messages put together from the deltas of streaming parsers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from specdec.gateway.chat.deltas import MessageDelta, StreamingParser


@dataclass
class Message:
    """The message that all deltas make."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, deltas: list[MessageDelta]) -> None:
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            if (call := delta.tool_call) is None:
                continue
            if call.index == len(self.calls):
                assert call.id
                assert call.name
                self.calls.append((call.name, call.arguments))
                self.ids.append(call.id)
            else:
                assert (call.index, call.id, call.name) == (len(self.calls) - 1, "", "")
                name, arguments = self.calls[-1]
                self.calls[-1] = (name, arguments + call.arguments)

    @property
    def decoded(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def parse(parser: StreamingParser, pieces: list[str]) -> Message:
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    return message


def told(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    """All but the ids, which are random."""
    return message.content, message.reasoning, message.calls


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
