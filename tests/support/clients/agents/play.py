"""Plays the ten turns with a client, in whichever environment has it: a stream broken off, streamed, whole, kept."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tests.support.clients.agents.turns import Answer, Option, Turn, result_of


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """What a client connects to."""

    url: str
    """Of the gateway, without /v1."""
    model: str
    cut_tokens: int
    """Tokens of the answer that shall be cut."""


class Conversation(Protocol):
    """A client with its messages, in the classes of its library."""

    def user(self, text: str) -> None:
        """Add a message of the user."""

    def result(self, number: int, text: str) -> None:
        """Add the result of a call of the kept answer."""

    def break_off(self, option: Option) -> None:
        """Ask, and close the stream after its first event."""

    def streamed(self, option: Option) -> Answer:
        """Ask, and read the stream."""

    def whole(self, option: Option) -> Answer:
        """Ask without a stream, and keep the answer as the library has it."""


def play(conversation: Conversation, turns: list[tuple[str, Option]]) -> Iterator[Answer]:
    """The answers. A stream must say what the whole answer says."""
    answer = Answer("", [])
    for user, option in turns:
        for number, arguments in enumerate(answer.calls):
            conversation.result(number, result_of(arguments))
        if user:
            conversation.user(user)
        conversation.break_off(option)
        streamed = conversation.streamed(option)
        answer = conversation.whole(option)
        if streamed != answer:
            raise AssertionError(f"{streamed} was streamed, {answer} came whole")
        yield answer


def asked(turns: tuple[Turn, ...]) -> list[tuple[str, Option]]:
    """What a client has to know of the turns."""
    return [(turn.user, turn.option) for turn in turns]


def arguments_of(text: str) -> Any:
    """Arguments that a client has as text; None if they are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def main(client: Callable[[Where], Conversation]) -> None:
    """Play what standard input says (`where` and `turns`), and print each answer as a line of JSON."""
    told = json.load(sys.stdin)
    for answer in play(client(Where(**told["where"])), [tuple(turn) for turn in told["turns"]]):
        sys.stdout.write(json.dumps(dataclasses.asdict(answer)) + "\n")
