"""Where a chat template takes system messages, found by rendering: at the beginning, later, or nowhere.

Agents send instructions in mid-conversation. Many templates refuse these, or leave them out, and some know no system
message at all. Such a message becomes text of its neighbour, so that the conversation goes on with all it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

Message = dict[str, Any]
_FIRST, _LATER = "What the system says first.", "What the system says later."
_ASKED, _SAID = "What the user asks.", "What the assistant says."
_NEIGHBOURS = ("user", "tool")
"""Roles whose messages take the text of a system message."""


class SystemPlaces:
    """The places of one template. Each is found when the first conversation needs it."""

    def __init__(
        self,
        probe: Callable[[list[Message]], str | None],
        fit_content: Callable[[Message], Message],
        called: Callable[[], Message],
    ) -> None:
        """Find no place yet.

        Args:
            probe: renders messages; None if the template refuses them.
            fit_content: puts a message's text into the template's form.
            called: returns a message with a call in the template's form.
        """
        self._probe = probe
        self._fit_content = fit_content
        self._called = called

    def place(self, messages: Sequence[Message]) -> list[tuple[int, Message]]:
        """The messages as the template takes them, each with its former index."""
        given = list(enumerate(messages))
        where = [index for index, message in given if message["role"] == "system"]
        ends_with_result = messages[-1]["role"] == "tool"
        if where and not (self._takes_first and (not ends_with_result or self._takes_first_before_results)):
            return _moved(given)
        if any(where) and not self._takes_later:
            num_first = next((index for index, (_, m) in enumerate(given) if m["role"] != "system"), len(given))
            first = [(0, _joined(*messages[:num_first]))] if num_first else []
            return [*first, *_moved(given[num_first:])]
        return given

    @cached_property
    def _takes_first(self) -> bool:
        return self._takes(("system", _FIRST), ("user", _ASKED))

    @cached_property
    def _takes_later(self) -> bool:
        # Some templates keep the last of several.
        return self._takes(
            ("system", _FIRST), ("user", _ASKED), ("assistant", _SAID), ("system", _LATER), ("user", _ASKED)
        )

    @cached_property
    def _takes_first_before_results(self) -> bool:
        # Mistral Nemo's shows it only if the last message is the user's.
        called = self._called()
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": _SAID}
        return self._takes(("system", _FIRST), ("user", _ASKED), after=[called, self._fit_content(result)])

    def _takes(self, *told: tuple[str, str], after: Sequence[Message] = ()) -> bool:
        """Whether all system messages are rendered; also if the conversation is refused without them."""
        messages = [*(self._fit_content({"role": role, "content": text}) for role, text in told), *after]
        if self._probe([message for message in messages if message["role"] != "system"]) is None:
            return True
        shown = self._probe(messages) or ""
        return all(text in shown for role, text in told if role == "system")


def _moved(given: Sequence[tuple[int, Message]]) -> list[tuple[int, Message]]:
    """Messages with the system's texts before the next one of the user, else behind the one before, else alone."""
    moved: list[tuple[int, Message]] = []
    waiting: list[tuple[int, Message]] = []
    for index, message in (*given, (len(given), None)):
        if message is not None and message["role"] == "system":
            waiting.append((index, message))
            continue
        texts, before = [text for _, text in waiting], moved[-1][1]["role"] if moved else ""
        if not texts:
            pass
        elif message is not None and message["role"] == "user":
            message = {**message, "content": _joined(*texts, message)["content"]}
        elif before in _NEIGHBOURS:
            moved[-1] = moved[-1][0], _joined(moved[-1][1], *texts)
        elif message is not None and message["role"] == "tool":
            message = _joined(message, *texts)
        else:
            moved.append((waiting[0][0], {**_joined(*texts), "role": "user"}))
        waiting = []
        if message is not None:
            moved.append((index, message))
    return moved


def _joined(first: Message, *more: Message) -> Message:
    """The first message with the content of all: paragraphs of a text, or parts."""
    contents = [each for message in (first, *more) if (each := message.get("content"))]
    if all(isinstance(content, str) for content in contents):
        return {**first, "content": "\n\n".join(contents)}
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**first, "content": parts}
