"""Separate a model's think section from its answer, while it streams."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from specdec.gateway.chat.deltas import MessageDelta, PlainParser, StreamingParser, may_become, split_at_marker
from specdec.gateway.chat.tool_calls.harmony import HarmonyParser


@dataclass(frozen=True, slots=True)
class _Style:
    """Markers of a model family's think sections."""

    start: str
    end: str
    starts_in_prompt: bool
    """The prompt ends with the start marker, so the output has only the end marker."""
    opening_token: str = ""
    """The token that begins the start marker; empty: the marker is one token."""


_THINK = ("<think>", "</think>")
_STYLES = {
    "think": _Style(*_THINK, starts_in_prompt=False),
    "qwen3": _Style(*_THINK, starts_in_prompt=False),
    "qwen3_thinking": _Style(*_THINK, starts_in_prompt=True),
    "deepseek_r1": _Style(*_THINK, starts_in_prompt=True),
    "deepseek_v3": _Style(*_THINK, starts_in_prompt=False),
    "mistral": _Style("[THINK]", "[/THINK]", starts_in_prompt=False),
    "seed_oss": _Style("<seed:think>", "</seed:think>", starts_in_prompt=False),
    "gemma4": _Style("<|channel>thought", "<channel|>", starts_in_prompt=False, opening_token="<|channel>"),
}
REASONING_PARSERS = ("none", *_STYLES, "harmony")
"""Names that `make_reasoning_parser` knows."""
_WITH_SPECIAL_TOKENS = ("mistral", "harmony", "seed_oss", "gemma4")


ReasoningParser: TypeAlias = StreamingParser
"""A parser whose deltas are content and reasoning."""


def make_reasoning_parser(name: str, *, thinking: bool | None = None) -> StreamingParser:
    """Make a parser of one message.

    Args:
        name: one of `REASONING_PARSERS`; "none" treats all text as content.
        thinking: the request's template variable (enable_thinking, thinking). False: the output begins outside a
            section. None, and True for a family that writes the start itself: the family's default.

    Raises:
        ValueError: the name is unknown.
    """
    if name == "none":
        return PlainParser()
    if name == "harmony":
        return HarmonyParser(tells_calls=False)
    style = _STYLES.get(name)
    if style is None:
        raise ValueError(f"{name!r} is none of {', '.join(REASONING_PARSERS)}")
    starts_open = style.starts_in_prompt if thinking is None else thinking and _opens_when_asked(name, style)
    return ThinkParser(style.start, style.end, starts_open=starts_open)


def marks_are_special_tokens(name: str) -> bool:
    """Whether markers of reasoning may be special tokens, so that the text must keep them (skip_special_tokens)."""
    return name in _WITH_SPECIAL_TOKENS


def end_of_thinking(name: str, thinking: bool | None) -> str:
    """The marker after which the answer begins; empty if the output has no think section.

    Args:
        name: as for `make_reasoning_parser`.
        thinking: the request's template variable; None: not set.
    """
    style = _STYLES.get(name)
    return "" if style is None or thinking is False else style.end


def think_markers(name: str) -> tuple[str, str] | None:
    """Start and end of think sections; None if the parser knows none."""
    style = _STYLES.get(name)
    return None if style is None else (style.start, style.end)


def opening_token(name: str) -> str:
    """The token that begins a think section; empty if the parser knows none."""
    style = _STYLES.get(name)
    return "" if style is None else style.opening_token or style.start


def _opens_when_asked(name: str, style: _Style) -> bool:
    # DeepSeek V3.1 thinks on request, and then its template opens the section.
    return style.starts_in_prompt or name == "deepseek_v3"


class _At(Enum):
    START = auto()
    REASONING_START = auto()
    REASONING = auto()
    ANSWER_START = auto()
    ANSWER = auto()


class ThinkParser:
    """Finds one think section at the start of a message. White space at its borders is layout and is dropped.

    Without an end marker the rest is reasoning, as when a model runs out of tokens.
    """

    def __init__(self, start: str, end: str, *, starts_open: bool) -> None:
        """`starts_open`: the output begins within the section; a start marker is dropped there, too."""
        self._start = start
        self._end = end
        self._starts_open = starts_open
        self._at = _At.START
        self._held = ""

    def begin(self, is_open: bool) -> None:
        """Say before the first text whether it begins within the section, by the end of the rendered prompt."""
        self._starts_open = is_open

    @property
    def is_open(self) -> bool:
        """Whether the section has begun and not ended."""
        if self._at is _At.START:
            return self._starts_open
        return self._at in (_At.REASONING_START, _At.REASONING)

    def push(self, text: str) -> list[MessageDelta]:
        """See `StreamingParser.push`."""
        self._held += text
        deltas: list[MessageDelta] = []
        before = None
        while before is not self._at:
            before = self._at
            self._step(deltas)
        return deltas

    def finish(self) -> list[MessageDelta]:
        """See `StreamingParser.finish`."""
        held, self._held = self._held, ""
        match self._at:
            case _At.START if self._starts_open:
                reasoning, content = held.strip(), ""
            case _At.REASONING:
                reasoning, content = held.rstrip(), ""
            case _At.REASONING_START | _At.ANSWER_START:
                reasoning, content = "", ""
            case _:
                reasoning, content = "", held
        return [MessageDelta(content, reasoning)] if content or reasoning else []

    def _step(self, deltas: list[MessageDelta]) -> None:
        match self._at:
            case _At.START:
                self._begin()
            case _At.REASONING_START:
                self._held = self._held.lstrip()
                self._at = _At.REASONING if self._held else _At.REASONING_START
            case _At.REASONING:
                self._reason(deltas)
            case _At.ANSWER_START:
                self._held = self._held.lstrip()
                self._at = _At.ANSWER if self._held else _At.ANSWER_START
            case _At.ANSWER:
                if self._held:
                    deltas.append(MessageDelta(content=self._held))
                self._held = ""

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._held = text[len(self._start) :]
            self._at = _At.REASONING_START
        elif not may_become(text, self._start):
            self._at = _At.REASONING_START if self._starts_open else _At.ANSWER

    def _reason(self, deltas: list[MessageDelta]) -> None:
        reasoning, end, rest = split_at_marker(self._held, [self._end])
        told = reasoning.rstrip()
        self._held = rest if end else self._held[len(told) :]
        if told:
            deltas.append(MessageDelta(reasoning=told))
        if end:
            self._at = _At.ANSWER_START
