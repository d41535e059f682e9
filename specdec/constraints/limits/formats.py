"""The formats of a structural tag, which describe an output as a tree, such as tool calls between free text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ConstString:
    """A fixed text."""

    value: str


@dataclass(frozen=True, slots=True)
class SchemaFormat:
    """JSON that a schema allows; `schema` is an object or a boolean."""

    schema: Mapping[str, Any] | bool
    is_compact: bool = False
    """At most one space stands between two tokens."""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A text of a grammar, in llguidance's Lark syntax."""

    text: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Free text up to the end of its tag or of the output."""

    excludes: tuple[str, ...] = ()
    """Texts that it must not contain."""


@dataclass(frozen=True, slots=True)
class SequenceFormat:
    """All elements, one after the other."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the elements."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The content `least` to `most` times; None: no upper bound."""

    content: Format
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Tag:
    """Content between a begin and one of the ends."""

    begin: str
    content: Format
    ends: tuple[str, ...]
    """At least one; an empty end stands alone."""


@dataclass(frozen=True, slots=True)
class TriggeredTags:
    """Free text in which each trigger begins a tag."""

    triggers: tuple[str, ...]
    """No trigger is part of another."""
    tags: tuple[Tag, ...]
    """The begin of each starts with one of the triggers."""
    at_least_one: bool = False
    """The text begins with a tag."""
    stop_after_first: bool = False
    """The text ends with the first tag."""
    excludes: tuple[str, ...] = ()
    """Texts that do not occur between tags."""


@dataclass(frozen=True, slots=True)
class SeparatedTags:
    """Tags with a text between them, and no other text."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString | SchemaFormat | Regex | LarkGrammar | AnyText | SequenceFormat | Either | Repeat | Tag | TriggeredTags
    | SeparatedTags
)  # fmt: skip
