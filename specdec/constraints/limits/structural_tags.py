"""Reads structural tags, in both forms that vLLM accepts.

`{"format": ...}` is xgrammar's (https://xgrammar.mlc.ai/docs); the older `{"structures": ..., "triggers": ...}` means
triggered tags whose contents are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from specdec.constraints.limits.formats import (
    AnyText,
    ConstString,
    Either,
    Format,
    LarkGrammar,
    Regex,
    Repeat,
    SchemaFormat,
    SeparatedTags,
    SequenceFormat,
    Tag,
    TriggeredTags,
)

_MOST_FORMATS = 512
"""Formats of a structural tag; a tag and its content count as two."""
_MOST_DEPTH = 16
"""Nesting depth of formats."""
_MOST_TEXTS = 64
"""Triggers, excluded texts or ends of one tag."""
_MOST_TEXT_BYTES = 256
"""Bytes of one such text, for which free text is searched."""
_MOST_REPEATS = 1000


class StructuralTagFault(Exception):
    """A structural tag that is refused. `path` names the faulty field, such as `.format.tags[0].begin`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def read_structural_tag(text: str) -> Format:
    """Read a structural tag from JSON. Raises StructuralTagFault for malformed, unsupported or too large ones.

    Free text must stand where its end is marked: directly in a tag with an end, or last in the output. Cost: linear in
    the text, quadratic in the number of triggers.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise StructuralTagFault("", "is nested too deeply") from None
    except UnicodeEncodeError:
        raise StructuralTagFault("", "has an unpaired surrogate") from None
    except ValueError as error:
        raise StructuralTagFault("", f"is not JSON: {error}") from None
    outer = _Fields("", value)
    if outer.get("type") not in (None, "structural_tag"):
        raise StructuralTagFault(".type", "must be structural_tag")
    if outer.get("format") is None:
        found: Format = _Reader().older(outer)
    else:
        found = _Reader().format(".format", outer.get("format"), 0, free=True)
    outer.check_names()
    return found


class _Fields:
    """An object's fields. `check_names` refuses those that were never read, unless null."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise StructuralTagFault(path, "must be an object")
        self.path = path
        self._values = {name: each for name, each in value.items() if each is not None}
        self._asked: set[str] = set()

    def get(self, name: str) -> Any:
        self._asked.add(name)
        return self._values.get(name)

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not (value or may_be_empty):
            raise StructuralTagFault(
                f"{self.path}.{name}", f"must be a text{'' if may_be_empty else ', and not empty'}"
            )
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise StructuralTagFault(f"{self.path}.{name}", "must be true or false")
        return bool(value)

    def whole_number(self, name: str, least: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_REPEATS:
            raise StructuralTagFault(f"{self.path}.{name}", f"must be a whole number from {least} to {_MOST_REPEATS}")
        return value

    def many(self, name: str) -> list[tuple[str, Any]]:
        """The items of a list that is not empty, each with its path."""
        value = self.get(name)
        if not isinstance(value, list) or not value:
            raise StructuralTagFault(f"{self.path}.{name}", "must be a list, and not empty")
        return [(f"{self.path}.{name}[{index}]", item) for index, item in enumerate(value)]

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts without empty ones."""
        found = self.many(name)
        if len(found) > _MOST_TEXTS:
            raise StructuralTagFault(f"{self.path}.{name}", f"{len(found)} texts are more than {_MOST_TEXTS}")
        for path, text in found:
            if not isinstance(text, str) or not 0 < len(text.encode()) <= _MOST_TEXT_BYTES:
                raise StructuralTagFault(path, f"must be a text of 1 to {_MOST_TEXT_BYTES} bytes")
        return tuple(text for _, text in found)

    def excludes(self) -> tuple[str, ...]:
        return self.texts("excludes") if self.get("excludes") else ()

    def check_names(self) -> None:
        for name in self._values:
            if name not in self._asked:
                raise StructuralTagFault(f"{self.path}.{name[:100]}", "is not supported")


class _Reader:
    """Reads formats; their total number is bounded."""

    def __init__(self) -> None:
        self._num_left = _MOST_FORMATS
        # Arguments: the format's fields, its depth, and whether it may end with free text.
        self._kinds: dict[str, Callable[[_Fields, int, bool], Format]] = {
            "const_string": lambda fields, _, __: ConstString(fields.text("value")),
            "json_schema": lambda fields, _, __: self._json_schema(fields),
            "regex": lambda fields, _, __: Regex(fields.text("pattern")),
            "grammar": lambda fields, _, __: LarkGrammar(fields.text("grammar")),
            "any_text": lambda fields, _, free: self._any_text(fields, free),
            "sequence": self._sequence,
            "or": self._either,
            "optional": lambda fields, depth, _: self._repeat(fields, depth, 0, 1),
            "plus": lambda fields, depth, _: self._repeat(fields, depth, 1, None),
            "star": lambda fields, depth, _: self._repeat(fields, depth, 0, None),
            "repeat": self._counted,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated_tags,
        }

    def format(self, path: str, value: object, depth: int, *, free: bool) -> Format:
        fields = _Fields(path, value)
        self._num_left -= 1
        if self._num_left < 0:
            raise StructuralTagFault(path, f"there are more than {_MOST_FORMATS} formats")
        if depth >= _MOST_DEPTH:
            raise StructuralTagFault(path, f"is in more than {_MOST_DEPTH} other formats")
        kind = fields.get("type")
        read = self._kinds.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise StructuralTagFault(f"{path}.type", f"must be one of {', '.join(self._kinds)}")
        found = read(fields, depth, free)
        fields.check_names()
        return found

    def older(self, outer: _Fields) -> TriggeredTags:
        """The older form, with structures and triggers."""
        if outer.get("structures") is None:
            raise StructuralTagFault("", "one of format and structures must be set")
        tags = []
        for path, item in outer.many("structures"):
            fields = _Fields(path, item)
            self._num_left -= 2
            if self._num_left < 0:
                raise StructuralTagFault(path, f"there are more than {_MOST_FORMATS // 2} structures")
            schema = _schema(fields, "schema") if fields.get("schema") is not None else True
            begin, end = fields.text("begin"), fields.text("end", may_be_empty=True)
            tags.append(Tag(begin, SchemaFormat(schema), (end,)))
            fields.check_names()
        return _triggered(outer, "structures", tuple(tags))

    def _json_schema(self, fields: _Fields) -> SchemaFormat:
        style = fields.get("style")
        if style not in (None, "json", "compact_json"):
            raise StructuralTagFault(f"{fields.path}.style", "must be json or compact_json")
        if fields.flag("any_order"):
            raise StructuralTagFault(f"{fields.path}.any_order", "is not supported")
        return SchemaFormat(_schema(fields, "json_schema"), is_compact=style == "compact_json")

    def _any_text(self, fields: _Fields, free: bool) -> AnyText:
        self._check_place(fields, free)
        return AnyText(fields.excludes())

    def _sequence(self, fields: _Fields, depth: int, free: bool) -> SequenceFormat:
        items = fields.many("elements")
        last = len(items) - 1
        return SequenceFormat(
            tuple(self.format(p, v, depth + 1, free=free and i == last) for i, (p, v) in enumerate(items))
        )

    def _either(self, fields: _Fields, depth: int, free: bool) -> Either:
        return Either(tuple(self.format(p, v, depth + 1, free=free) for p, v in fields.many("elements")))

    def _repeat(self, fields: _Fields, depth: int, least: int, most: int | None) -> Repeat:
        content = self.format(f"{fields.path}.content", fields.get("content"), depth + 1, free=False)
        return Repeat(content, least, most)

    def _counted(self, fields: _Fields, depth: int, _: bool) -> Repeat:
        least = fields.whole_number("min", 0)
        most = None if fields.get("max") == -1 else fields.whole_number("max", max(1, least))
        return self._repeat(fields, depth, least, most)

    def _tag(self, fields: _Fields, depth: int, free: bool) -> Tag:
        begin, ends = fields.text("begin", may_be_empty=True), _ends(fields)
        # The end of a tag without an end text is as invisible as that of its content.
        content = self.format(f"{fields.path}.content", fields.get("content"), depth + 1, free=free or ends != ("",))
        return Tag(begin, content, ends)

    def _tags(self, fields: _Fields, depth: int, *, free: bool) -> tuple[Tag, ...]:
        found = []
        for path, value in fields.many("tags"):
            if not isinstance(value, dict) or value.get("type") not in (None, "tag"):
                raise StructuralTagFault(f"{path}.type", "must be tag")
            found.append(self.format(path, {**value, "type": "tag"}, depth + 1, free=free))
        return tuple(tag for tag in found if isinstance(tag, Tag))

    def _triggered_tags(self, fields: _Fields, depth: int, free: bool) -> TriggeredTags:
        self._check_place(fields, free)
        return _triggered(fields, "tags", self._tags(fields, depth, free=False))

    def _separated_tags(self, fields: _Fields, depth: int, _: bool) -> SeparatedTags:
        return SeparatedTags(
            self._tags(fields, depth, free=False),
            fields.text("separator", may_be_empty=True),
            at_least_one=fields.flag("at_least_one"),
            stop_after_first=fields.flag("stop_after_first"),
        )

    @staticmethod
    def _check_place(fields: _Fields, free: bool) -> None:
        if not free:
            raise StructuralTagFault(fields.path, "free text must be in a tag with an end, or last in the output")


def _triggered(fields: _Fields, name: str, tags: tuple[Tag, ...]) -> TriggeredTags:
    triggers = fields.texts("triggers")
    for index, trigger in enumerate(triggers):
        if any(trigger in other for other in (*triggers[:index], *triggers[index + 1 :])):
            raise StructuralTagFault(f"{fields.path}.triggers[{index}]", "is part of another trigger")
    for index, tag in enumerate(tags):
        if not tag.begin.startswith(triggers):
            raise StructuralTagFault(f"{fields.path}.{name}[{index}].begin", "starts with none of the triggers")
    return TriggeredTags(
        triggers,
        tags,
        at_least_one=fields.flag("at_least_one"),
        stop_after_first=fields.flag("stop_after_first"),
        excludes=fields.excludes(),
    )


def _ends(fields: _Fields) -> tuple[str, ...]:
    return fields.texts("end") if isinstance(fields.get("end"), list) else (fields.text("end", may_be_empty=True),)


def _schema(fields: _Fields, name: str) -> Mapping[str, Any] | bool:
    schema = fields.get(name)
    if not isinstance(schema, dict | bool):
        raise StructuralTagFault(f"{fields.path}.{name}", "must be an object or a boolean, a JSON schema")
    return schema


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
