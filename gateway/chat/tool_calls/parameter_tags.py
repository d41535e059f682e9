"""Calls whose arguments stand in tags, one for each: Qwen3-Coder, GLM, MiniMax, Seed-OSS, DeepSeek V3.2 and later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.gateway.chat.deltas import may_become, split_at_marker
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser
from specdec.gateway.chat.tool_calls.parts.call_object import MOST_NAME_CHARS
from specdec.gateway.chat.tool_calls.parts.typed_text import ALL_TYPES, as_json_of_type, types_of

_MOST_SPACE_CHARS = 256
"""Characters of white space between two tags, at most."""
_NAME = re.compile(r'\s*"?([^\s"<>{}]+)"?\s*')
_KEY = re.compile(r'\s*(?:"([^"\n]*)"|([^"\n]*?))(?:\s+string="(true|false)")?\s*')


@dataclass(frozen=True, slots=True)
class TagForm:
    """The tags of one family."""

    call: str
    """Start of a call, before its name."""
    name_ends: tuple[str, ...]
    end_call: str
    parameter: str
    """Start of an argument, before its key."""
    key_end: str
    end_parameter: str
    value_start: str = ""
    """Tag between key and value."""
    block: str = ""
    """Tag around calls; a call may stand without it, too."""
    end_block: str = ""
    has_layout: bool = False
    """A line break at either end of a value is layout."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers that begin a call."""
        return (self.block, self.call) if self.block else (self.call,)

    @property
    def call_ends(self) -> tuple[str, ...]:
        """Markers that end a call."""
        return (self.end_call, self.end_block) if self.end_block else (self.end_call,)

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Markers that may end a value: models forget the tag for it."""
        return (self.end_parameter, self.parameter, self.end_call)


def _in_functions(block: str, end_block: str) -> TagForm:
    return TagForm(
        "<function=", (">",), "</function>", "<parameter=", ">", "</parameter>",
        block=block, end_block=end_block, has_layout=True,
    )  # fmt: skip


_D = "｜DSML｜"
_GLM = ("<tool_call>", ("\n", "<arg_key>", "</tool_call>"), "</tool_call>")
FORMS = MappingProxyType(
    {
        "qwen3_coder": (_in_functions("<tool_call>", "</tool_call>"),),
        "seed_oss": (_in_functions("<seed:tool_call>", "</seed:tool_call>"),),
        "glm45": (TagForm(*_GLM, "<arg_key>", "</arg_key>", "</arg_value>", value_start="<arg_value>"),),
        "minimax_m2": (
            TagForm(
                "<invoke name=", (">",), "</invoke>", "<parameter name=", ">", "</parameter>",
                block="<minimax:tool_call>", end_block="</minimax:tool_call>",
            ),
        ),
        "deepseek_v32": tuple(
            TagForm(
                f"<{_D}invoke name=", (">",), f"</{_D}invoke>", f"<{_D}parameter name=", ">", f"</{_D}parameter>",
                block=f"<{_D}{block}>", end_block=f"</{_D}{block}>",
            )
            for block in ("function_calls", "tool_calls")
        ),
    }
)  # fmt: skip
"""The forms of each family, by the parser's name."""


class ParameterTagsParser(BufferedParser):
    """Values are written without types: the function's schema names them, unless the tag says whether it is a text.

    A text streams. Any other value is emitted at its end, as JSON; a value that does not fit its type is emitted as a
    text. An end tag inside a value is part of it: what follows an end must be the next tag.
    """

    def __init__(self, family: str, schemas: Mapping[str, Any] | None = None) -> None:
        """Begin a message.

        Args:
            family: one of `FORMS`.
            schemas: the JSON schema of each function's parameters; without one all values are texts.
        """
        super().__init__()
        self._forms = FORMS[family]
        self.starts = tuple(dict.fromkeys(start for form in self._forms for start in form.starts))
        self._form = self._forms[0]
        self._is_in_block = False
        self._schemas = schemas or {}
        self._function = ""
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._has_parameters = False
        self._at_start = False
        self._is_empty = True
        """No text of the value was read."""

    def _started(self, marker: str) -> bool:
        self._raw = marker
        self._form = next(form for form in self._forms if marker in form.starts)
        self._is_in_block = marker == self._form.block
        self._state = self._before_call if self._is_in_block else self._name
        return True

    def _before_call(self) -> bool:
        if not self._hold_space() or may_become(self._buffer, self._form.call):
            return False
        if not self._buffer.startswith(self._form.call):
            return self._no_call()
        self._hold(len(self._form.call))
        self._state = self._name
        return True

    def _name(self) -> bool:
        if self._form.value_start and not self._hold_space():
            return False
        name, end, rest = split_at_marker(self._buffer, self._form.name_ends)
        found = _NAME.fullmatch(name)
        if len(name) > MOST_NAME_CHARS or "\n" in name or (end and found is None):
            return self._no_call()
        if not end or found is None:
            return False
        self._buffer = end + rest if end in (self._form.parameter, self._form.end_call) else rest
        self._raw = ""
        self._function, self._has_parameters = found[1], False
        self._writer.begin_call(self._function)
        self._writer.arguments("{")
        self._state = self._between
        return True

    def _between(self) -> bool:
        """The state before a parameter or the call's end. Other text here is content."""
        text, marker, self._buffer = split_at_marker(self._buffer, (self._form.parameter, *self._form.call_ends))
        self._writer.content(text)
        if marker == self._form.parameter:
            self._state = self._in_key
        elif marker:
            self._end_call()
            self._state = self._after_call if self._is_in_block and marker == self._form.end_call else self._text
        return bool(marker)

    def _in_key(self) -> bool:
        head, end, rest = split_at_marker(self._buffer, [self._form.key_end])
        found = _KEY.fullmatch(head)
        if len(head) > MOST_NAME_CHARS or "\n" in head or (end and found is None):
            self._buffer = self._form.parameter[1:] + self._buffer
            self._writer.content(self._form.parameter[0])
            self._state = self._between
            return True
        if not end or found is None:
            return False
        self._buffer = rest
        self._key = (found[2] if found[1] is None else found[1]).strip()
        self._types = types_of(self._schemas.get(self._function), self._key)
        if found[3]:
            self._types = frozenset({"string"} if found[3] == "true" else {*ALL_TYPES} - {"string"})
        self._state = self._before_value
        return True

    def _before_value(self) -> bool:
        """The state before the tag that begins the value. Other text before it is part of the value."""
        start = self._form.value_start
        bare = self._buffer.lstrip() if start else self._buffer
        if start and (not bare or may_become(bare, start)):
            return False
        self._buffer = bare.removeprefix(start) if bare.startswith(start) else self._buffer
        self._writer.arguments(
            (", " if self._has_parameters else "") + json.dumps(self._key, ensure_ascii=False) + ": "
        )
        if self._is_text:
            self._writer.arguments('"')
        self._has_parameters, self._at_start, self._value = True, self._form.has_layout, []
        self._is_empty = True
        self._state = self._in_value
        return True

    @property
    def _is_text(self) -> bool:
        """Whether the value must be a text, which streams."""
        return self._types <= {"string"}

    def _in_value(self) -> bool:
        if self._at_start:
            self._at_start = False
            self._buffer = self._buffer.removeprefix("\n")
        text, marker, rest = split_at_marker(self._buffer, self._form.value_ends)
        ends = self._ends_value(text, marker, rest) if marker else None
        if ends is False:
            self._give(text + marker)
            self._buffer = rest
            return True
        # A line break before a tag is layout, but not all families have it before the value's own.
        is_kept = marker == self._form.end_parameter and not self._form.has_layout
        line_break = "\n" if text.endswith("\n") and not is_kept else ""
        self._give(text.removesuffix(line_break))
        if not ends:
            self._buffer = line_break + marker + rest
            return False
        self._end_value()
        self._buffer = rest if marker == self._form.end_parameter else marker + rest
        self._state = self._between
        return True

    def _ends_value(self, before: str, marker: str, rest: str) -> bool | None:
        """Whether a marker in a value ends it, by what follows; None: what follows decides."""
        form = self._form
        if marker == form.parameter:
            return before.endswith("\n") or (not before and self._is_empty)
        if marker == form.end_parameter:
            follows: tuple[str, ...] = (form.parameter, *form.call_ends)
        elif self._is_in_block or not form.block:
            follows = (*form.starts, form.end_block) if form.end_block else form.starts
        else:
            return True
        bare = rest.lstrip()
        if len(rest) - len(bare) > _MOST_SPACE_CHARS:
            return False
        rest = bare
        if rest.startswith(follows):
            return True
        return None if any(may_become(rest, follow) for follow in follows) else False

    def _give(self, text: str) -> None:
        self._is_empty &= not text
        if self._is_text:
            self._writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._writer.arguments('"' if self._is_text else as_json_of_type("".join(self._value), self._types))

    def _end_call(self) -> None:
        self._writer.arguments("}")
        self._writer.drop_space()

    def _after_call(self) -> bool:
        text, marker, self._buffer = split_at_marker(self._buffer, [self._form.end_block, *self.starts])
        self._writer.content(text)
        if not marker:
            return False
        if marker == self._form.end_block:
            self._state = self._text
        elif marker == self._form.call:
            self._raw, self._state = marker, self._name
        else:
            return self._started(marker)
        return True

    def _end(self) -> None:
        if self._state == self._in_value:
            self._end_in_value()
        form = self._form
        ends = {
            self._between: (form.parameter, *form.call_ends),
            self._in_key: (self._buffer,),
            self._before_value: (self._buffer,),
            self._after_call: (form.end_block,),
        }
        if any(end.startswith(self._buffer) for end in ends.get(self._state, ())):
            self._buffer = ""  # the text ended within a tag
        super()._end()

    def _end_in_value(self) -> None:
        """The text ended in a value, within a tag, or behind a tag that ends the value as nothing follows."""
        _, marker, _ = split_at_marker(self._buffer, self._form.value_ends)
        self._buffer, self._state = "", self._text
        if marker:
            self._end_value()
        if marker == self._form.end_call:
            self._end_call()
