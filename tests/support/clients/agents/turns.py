"""Ten turns of an agent: what a client asks, what a model of a family writes, and what the client must get.

Only the standard library is imported: programs of other environments read this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

WEATHER = {"Rome": "21 degrees", "Oslo": "3 degrees"}
LINES = "a\nb\\d"
"""A value with a raw line break and a backslash, as models write them."""
NAME = "look"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "how": {"type": "string"}},
    "required": ["city"],
}
DESCRIPTION = "Look up the weather."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
CUT_RESULT = "The call was cut off."
_CITY_CHARS_OF_CUT = 2

Option = Literal["", "cut", "schema", "required"]
WriteCall = Callable[[Mapping[str, str]], str]
"""Writes a call with these arguments as a model of a family does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client made of an answer."""

    content: str
    calls: list[Any]
    """Arguments of each call; None where they are no JSON."""
    thoughts: str = ""
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: results of the last answer's calls, if it has some, and a message."""

    user: str = ""
    """Empty: the request ends with results."""
    option: Option = ""
    thoughts: str = ""
    ends_thoughts: bool = True
    says: str = ""
    calls: tuple[Mapping[str, str], ...] = ()

    def written(self, write: WriteCall) -> str:
        """What the model writes. That of an answer to be cut is more than the client gets."""
        text = f"<think>{self.thoughts}{'</think>' if self.ends_thoughts else ''}" if self.thoughts else ""
        if self.option == "required":
            forced = [{"name": NAME, "parameters": arguments} for arguments in self.calls]
            return text + json.dumps(forced, separators=(",", ":"))
        return text + self.says + "".join(map(write, self.calls))

    def cut(self, write: WriteCall) -> str:
        """What the client gets of it: arguments that end within a value."""
        text = self.written(write)
        return text[: text.index(self.calls[0]["city"]) + _CITY_CHARS_OF_CUT] if self.option == "cut" else text

    @property
    def answer(self) -> Answer:
        """What a client must get."""
        if self.option == "cut":
            return Answer(self.says, [None], self.thoughts, is_cut=True)
        return Answer(self.says, list(map(dict, self.calls)), self.thoughts)


_ROME = {"city": "Rome"}
TURNS = (
    Turn("Good day.", says="Good day to you."),
    Turn("How warm is Rome?", thoughts="Rome, then.", says="Let me see.", calls=(_ROME,)),
    Turn(thoughts="Hm.", says="Rome has 21 degrees."),
    Turn(
        "Compare it with Oslo.",
        thoughts="I must look twice.",
        ends_thoughts=False,
        calls=(_ROME, {"city": "Oslo", "how": "now"}),
    ),
    Turn(says="Rome is warmer."),
    Turn("Look again.", "cut", calls=(_ROME,)),
    Turn("And there?", calls=({"city": LINES},)),
    Turn("As data, please.", "schema", says='{"n": 21}'),
    Turn("You must look.", "required", calls=(_ROME,)),
    Turn("Thank you.", says="Good bye."),
)


def result_of(arguments: Any) -> str:
    """What the tool says; None stands for arguments that were cut."""
    if arguments is None:
        return CUT_RESULT
    return WEATHER.get(arguments["city"], f"unknown: {arguments['city']}")


def asked_last() -> Iterator[str]:
    """The text of the last message of each turn's request, all different."""
    results: list[str] = []
    for turn in TURNS:
        yield turn.user or results[-1]
        results = [result_of(arguments) for arguments in turn.answer.calls]


def faults(seen: list[Answer], *, tells_thoughts: bool) -> list[str]:
    """Where a client got something else."""
    wrong = [] if len(seen) == len(TURNS) else [f"{len(seen)} turns of {len(TURNS)}"]
    for number, (turn, got) in enumerate(zip(TURNS, seen, strict=False)):
        want = turn.answer
        if (got.content, got.calls, got.is_cut) != (want.content, want.calls, want.is_cut):
            wrong.append(f"turn {number}: {got} in place of {want}")
        elif got.thoughts != (want.thoughts if tells_thoughts else ""):
            wrong.append(f"turn {number}: thoughts are {got.thoughts!r} in place of {want.thoughts!r}")
    return wrong
