"""What the calls of each family look like, as a format of a structural tag.

Arguments are free where a mark ends them, and JSON or literals where nothing else does. In a structural tag the text of
a special token means that token, and free text has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from specdec.gateway.chat.tool_calls.parameter_tags import FORMS, TagForm

Format: TypeAlias = dict[str, Any]
_ANY: Format = {"type": "any_text"}
_OBJECT: Format = {"type": "json_schema", "json_schema": {"type": "object"}}
_LAYOUT = r"[ \n]{1,4}"
"""One expression for all white space: of two that overlap, the lexer tells the first only."""
_FUNCTION_NAME = "[A-Za-z0-9_.:/-]{1,256}"
_LITERAL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_LITERALS = r"""
call: NAME "(" (argument (COMMA argument)*)? ")"
argument: /[A-Za-z_][A-Za-z0-9_]{0,255}=/ value
value: TEXT | NUMBER | /True|False|None|true|false|null/ | list | dict
list: "[" (value (COMMA value)*)? "]"
dict: "{" (pair (COMMA pair)*)? "}"
pair: TEXT /: ?/ value
COMMA: /, ?/
NUMBER: /-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?/
TEXT: /"([^"\\\n\r]|ESCAPE)*"/ | /'([^'\\\n\r]|ESCAPE)*'/
""".replace("ESCAPE", r"""\\(["'\\nrtbf]|u([0-9a-cA-CefEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2})""")
"""Python's literals, as far as `PythonicParser` reads them."""


def calls_format(family: str, names: Sequence[str], *, parallel: bool) -> Format | None:
    """The format of a message that is calls and nothing else; None: the family's calls cannot be told from an answer.

    Args:
        family: name of a tool parser.
        names: functions that may be called, at least one.
        parallel: allow several calls.
    """
    write = _WRITTEN.get(family)
    return None if write is None else write(names, parallel)


def in_final_channel(answer: Format, calls: Format | None = None) -> Format:
    """A message of harmony: thoughts and comments, then the answer, or a call.

    Args:
        answer: format of the final channel's text.
        calls: format of a call with its header; None: it must not call.
    """
    final = _sequence(_text("<|channel|>final"), _optional(_text(" "), _JSON_TYPE), _text("<|message|>"), answer)
    return _sequence(_THOUGHTS, final if calls is None else _either(final, calls))


def forced_harmony_call(functions: Sequence[tuple[str, Format]]) -> Format:
    """A message of harmony that must call one of the functions, each with the format of its arguments.

    Two formats for each function, and nine.
    """
    begin, end = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
    return _sequence(_THOUGHTS, _either(*(_tag(begin + name + end, arguments, "") for name, arguments in functions)))


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _optional(*elements: Format) -> Format:
    return {"type": "optional", "content": _sequence(*elements)}


def _star(*elements: Format) -> Format:
    return {"type": "star", "content": _sequence(*elements)}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _up_to(end: str) -> Format:
    """Free text with its end."""
    return _tag("", _ANY, end)


def _several(call: Format, parallel: bool, separator: str = _LAYOUT) -> Format:
    return _sequence(call, _star(_optional(_regex(separator)), call)) if parallel else call


def _between(begin: str, end: str) -> Callable[[Sequence[str], bool], Format]:
    """Calls with nothing but text between two marks."""
    return lambda _, parallel: _several(_tag(begin, _ANY, end), parallel)


def _of_tags(family: str) -> Callable[[Sequence[str], bool], Format]:
    """Calls in tags that have no special tokens within the outer ones."""
    return _between(FORMS[family][0].block, FORMS[family][0].end_block)


def _glm(_: Sequence[str], parallel: bool) -> Format:
    form = FORMS["glm45"][0]
    key = _tag(form.parameter, _ANY, form.key_end)
    value = _tag(form.value_start, _ANY, form.end_parameter)
    named = _sequence(_SPACE, _regex(_FUNCTION_NAME), _SPACE, _star(key, _SPACE, value, _SPACE))
    return _several(_tag(form.call, named, form.end_call), parallel)


def _deepseek_v32(_: Sequence[str], parallel: bool) -> Format:
    # A special token stands within each tag, so that the end of a block cannot be told from that of a value. White
    # space ends a tag, as an expression for it before two tags would take the start of one for that of the other.
    def block(form: TagForm) -> Format:
        value = _tag(form.parameter, _sequence(_up_to(form.key_end), _ANY), form.end_parameter)
        inside = _sequence(_up_to(form.name_ends[0]), _SPACE, _star(value, _SPACE))
        call = _sequence(_tag(form.call, inside, form.end_call), _SPACE)
        calls = _sequence(call, _star(call)) if parallel else call
        return _sequence(_text(form.block), _SPACE, calls, _text(form.end_block))

    return _either(*map(block, FORMS["deepseek_v32"]))


def _kimi(_: Sequence[str], parallel: bool) -> Format:
    call = _tag("<|tool_call_begin|>", _sequence(_up_to("<|tool_call_argument_begin|>"), _ANY), "<|tool_call_end|>")
    return _sequence(
        _text("<|tool_calls_section_begin|>"), _several(call, parallel), _text("<|tool_calls_section_end|>")
    )


def _deepseek(_: Sequence[str], parallel: bool) -> Format:
    call = _tag("<｜tool▁call▁begin｜>", _sequence(_up_to("<｜tool▁sep｜>"), _ANY), "<｜tool▁call▁end｜>")
    return _sequence(_text("<｜tool▁calls▁begin｜>"), _several(call, parallel), _text("<｜tool▁calls▁end｜>"))


def _mistral(_: Sequence[str], parallel: bool) -> Format:
    properties = {"name": {"type": "string"}, "arguments": {"type": "object"}, "id": {"type": "string"}}
    items = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
    listed = {"type": "array", "minItems": 1, "items": {**items, "additionalProperties": False}}
    if not parallel:
        listed["maxItems"] = 1
    begin = _text("[TOOL_CALLS]")
    in_list = _sequence(begin, _optional(_text(" ")), {"type": "json_schema", "json_schema": listed})
    call_id = _optional(_text("[CALL_ID]"), _regex("[A-Za-z0-9_-]{1,64}"))
    named = _sequence(begin, _regex(_FUNCTION_NAME), call_id, _optional(_text("[ARGS]")), _OBJECT)
    return _either(in_list, _several(named, parallel))


def _gemma4(_: Sequence[str], parallel: bool) -> Format:
    inside = _sequence(_text("call:"), _star(_up_to('<|"|>')), _ANY)
    return _several(_tag("<|tool_call>", inside, "<tool_call|>"), parallel)


def _llama3(names: Sequence[str], parallel: bool) -> Format:
    properties = {"name": {"enum": list(names)}, "parameters": {"type": "object"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    call: Format = {"type": "json_schema", "json_schema": schema}
    return _sequence(_optional(_text("<|python_tag|>")), _several(call, parallel, "; ?|, ?|\n"))


def _pythonic(names: Sequence[str], parallel: bool) -> Format | None:
    known = [name for name in names if _LITERAL_NAME.fullmatch(name)]
    if not known:
        return None
    several = "(COMMA call)*" if parallel else ""
    written = " | ".join(json.dumps(name) for name in known)
    lark = f'start: "[" call {several} "]"{_LITERALS}NAME: {written}\n'
    grammar: Format = {"type": "grammar", "grammar": lark}
    return _sequence(_optional(_text("<|python_start|>")), grammar, _optional(_text("<|python_end|>")))


def _harmony(_: Sequence[str], __: bool) -> Format:
    # A call ends the message: the token behind it is an end of the output.
    name, kind = _regex(_FUNCTION_NAME), _optional(_optional(_text(" ")), _JSON_TYPE)
    in_channel = _sequence(_text("<|channel|>commentary to=functions."), name, kind)
    before_channel = _sequence(_text(" to=functions."), name, _text("<|channel|>commentary"), kind)
    return _sequence(_either(in_channel, before_channel), _text("<|message|>"), _OBJECT)


_SPACE = _optional(_regex(_LAYOUT))
_JSON_TYPE = _sequence(_optional(_text("<|constrain|>")), _text("json"))
_THOUGHTS = _star(
    _text("<|channel|>"),
    _regex("analysis|commentary"),
    _tag("<|message|>", _ANY, "<|end|>"),
    _text("<|start|>assistant"),
)
_WRITTEN: dict[str, Callable[[Sequence[str], bool], Format | None]] = {
    **dict.fromkeys(("hermes", "qwen"), _between("<tool_call>", "</tool_call>")),
    **{family: _of_tags(family) for family in ("qwen3_coder", "seed_oss", "minimax_m2")},
    "glm45": _glm,
    "deepseek_v32": _deepseek_v32,
    "kimi_k2": _kimi,
    "deepseek": _deepseek,
    "mistral": _mistral,
    "gemma4": _gemma4,
    "llama3_json": _llama3,
    "pythonic": _pythonic,
    "harmony": _harmony,
}
