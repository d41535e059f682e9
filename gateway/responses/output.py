"""The items of an answer, and the events that tell of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from specdec.gateway.responses.items import encrypted

Told = tuple[str, dict[str, Any]]
"""Type and fields of an event, without its number."""
_KINDS = MappingProxyType(
    {
        "message": ("msg", "response.output_text", "text"),
        "reasoning": ("rs", "response.reasoning_text", "text"),
        "function_call": ("fc", "response.function_call_arguments", "arguments"),
    }
)
"""By type of item: the prefix of its id, its events, and the field of the last of these with the whole text."""


@dataclass(slots=True)
class OutputItem:
    """An item while its text comes."""

    kind: str
    """message, reasoning or function_call."""
    index: int
    """Among the answer's items."""
    answer_id: str
    named: dict[str, str] = field(default_factory=dict)
    """call_id, name and namespace of a call."""
    encrypts: bool = False
    """Whether thoughts are encrypted as well."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its id."""
        return f"{_KINDS[self.kind][0]}_{self.answer_id}_{self.index}"

    @property
    def _at(self) -> dict[str, Any]:
        content = {} if self.kind == "function_call" else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.index, **content}

    def begin(self) -> Iterator[Told]:
        """The events that open it."""
        yield "response.output_item.added", {"output_index": self.index, "item": self._told("in_progress", "", [])}
        if self.kind != "function_call":
            yield "response.content_part.added", {**self._at, "part": self._part("", [])}

    def piece(self, text: str, logprobs: list[dict[str, Any]]) -> Told:
        """The event of more text."""
        self.pieces.append(text)
        self.logprobs += logprobs
        own = {"logprobs": logprobs} if self.kind == "message" else {}
        return f"{_KINDS[self.kind][1]}.delta", {**self._at, "delta": text, **own}

    def end(self, status: str) -> Iterator[Told]:
        """The events that close it; the last one has the whole item."""
        _, name, whole = _KINDS[self.kind]
        text = "".join(self.pieces)
        own: dict[str, Any] = {}
        if self.kind == "message":
            own = {"logprobs": self.logprobs}
        elif self.kind == "function_call":
            own = {"name": self.named["name"]}
        yield f"{name}.done", {**self._at, whole: text, **own}
        if self.kind != "function_call":
            yield "response.content_part.done", {**self._at, "part": self._part(text, self.logprobs)}
        item = self._told(status, text, [self._part(text, self.logprobs)])
        yield "response.output_item.done", {"output_index": self.index, "item": item}

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _told(self, status: str, text: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "message":
                return {**item, "role": "assistant", "content": parts}
            case "reasoning":
                opaque = {"encrypted_content": encrypted(text)} if self.encrypts and text else {}
                return {**item, "summary": [], "content": parts, **opaque}
        return {**item, **self.named, "arguments": text}
