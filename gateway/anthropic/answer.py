"""Translate the chunks of a stream to the events of /v1/messages, and these to one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from specdec.gateway.chat import parsing
from specdec.gateway.chat.deltas import MessageDelta, StreamingParser, ToolCallDelta
from specdec.gateway.translation.head import AnswerHead, is_thinking
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

Event = dict[str, Any]
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of each block's deltas, and the field with the piece."""


class MessageEvents:
    """The events of one answer."""

    def __init__(self, head: AnswerHead, parser: StreamingParser) -> None:
        self._head = head
        self._parser = parser
        self._num_blocks = 0
        self._open = ""
        """Type of the block that is open; empty: none."""
        self._call = -1
        """Number of the call that is open."""
        self._space = ""
        """White space of a text that has not begun: a text of white space alone is left out."""
        self._has_calls = False
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def add(self, chunk: api.GenerateResponse, _texts: TokenTexts) -> list[Event]:
        """The events of a chunk."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self._head.take(chunk.started)
                parsing.begin(self._parser, is_thinking(chunk.started))
                usage = {"input_tokens": chunk.started.num_prompt_tokens, "output_tokens": 0}
                return [{"type": "message_start", "message": self._message(usage)}]
            case "delta":
                return self._deltas(self._parser.push(chunk.delta.text))
            case "choice_finished":
                events = self._deltas(self._parser.finish())
                self._ending = self._end_of(chunk.choice_finished)
                return [*events, *self._close()]
            case "finished":
                usage = _usage(chunk.finished.usage)
                return [{"type": "message_delta", "delta": self._ending, "usage": usage}, {"type": "message_stop"}]
        return []

    def _deltas(self, deltas: list[MessageDelta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            if delta.reasoning:
                events += [*self._opened("thinking", thinking="", signature=""), self._piece(delta.reasoning)]
            if delta.content:
                events += self._text(delta.content)
            if delta.tool_call is not None:
                events += self._called(delta.tool_call)
        return events

    def _text(self, text: str) -> list[Event]:
        if self._open != "text":
            self._space += text
            if not self._space.strip():
                return []
            text, self._space = self._space, ""
        return [*self._opened("text", text=""), self._piece(text)]

    def _called(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        self._space = ""
        if call.index != self._call:
            events += [*self._close(), *self._opened("tool_use", id=call.id, name=call.name, input={})]
            self._call, self._has_calls = call.index, True
        return [*events, self._piece(call.arguments)] if call.arguments else events

    def _opened(self, kind: str, **fields: Any) -> list[Event]:
        """The events that open a block of a kind, unless one is open."""
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        block = {"type": kind, **fields}
        return [*events, {"type": "content_block_start", "index": self._num_blocks, "content_block": block}]

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        event = {"type": "content_block_stop", "index": self._num_blocks}
        self._open, self._num_blocks = "", self._num_blocks + 1
        return [event]

    def _piece(self, piece: str) -> Event:
        kind, name = _DELTAS[self._open]
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": {"type": kind, name: piece}}

    def _end_of(self, finished: api.ChoiceFinished) -> dict[str, Any]:
        if finished.reason == pb.FINISH_REASON_LENGTH:
            reason = "max_tokens"
        elif finished.WhichOneof("matched") == "stop_string":
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
        else:
            reason = "tool_use" if self._has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def whole_message(events: Iterable[Event]) -> dict[str, Any]:
    """The message of all events of an answer; the arguments of a call that was cut are an object as far as it goes."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    pieces: list[list[str]] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
                pieces.append([])
            case "content_block_delta":
                delta = event["delta"]
                pieces[-1].append(next(value for name, value in delta.items() if name != "type"))
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    for block, parts in zip(blocks, pieces, strict=True):
        text = "".join(parts)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
    return {**message, "content": blocks}


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = from_json(text, allow_partial="trailing-strings", cache_strings="none")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: api.Usage) -> dict[str, int]:
    """Anthropic counts the cached part of the prompt apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
