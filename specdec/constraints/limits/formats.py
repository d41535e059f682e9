"""What a structural tag is made of: an output as a tree of formats, such as calls of tools between free text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ConstString:
    """This text."""

    value: str


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema allows; `schema` is an object or a boolean."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A text of a grammar, in the form of Lark that llguidance reads."""

    text: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Free text, up to the end of the tag that it is in, or of the output."""

    excludes: tuple[str, ...] = ()
    """What it does not have in it."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """All of these, one after the other."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of these."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """From `least` to `most` times the same; None: any number."""

    content: Format
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Tag:
    """Something between a begin and one of its ends."""

    begin: str
    content: Format
    ends: tuple[str, ...]
    """One at least; an empty one is the only one."""

    @property
    def has_end(self) -> bool:
        """Whether a text tells where it ends."""
        return self.ends != ("",)


@dataclass(frozen=True, slots=True)
class TriggeredTags:
    """Free text in which each trigger begins a tag."""

    triggers: tuple[str, ...]
    """None is part of another."""
    tags: tuple[Tag, ...]
    """The begin of each starts with one of the triggers."""
    at_least_one: bool = False
    """The text begins with a tag."""
    stop_after_first: bool = False
    """The text ends with the first tag."""
    excludes: tuple[str, ...] = ()
    """What the text between tags does not have in it."""


@dataclass(frozen=True, slots=True)
class SeparatedTags:
    """Tags with a text between them, and no other text."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString | JsonSchema | Regex | LarkGrammar | AnyText | Sequence | Either | Repeat | Tag | TriggeredTags
    | SeparatedTags
)  # fmt: skip
