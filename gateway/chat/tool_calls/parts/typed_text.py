"""Convert values written without types to JSON of their schema's types."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

ALL_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_MOST_LITERAL_CHARS = 1 << 16
"""Characters of a literal, at most: Python's parser takes memory."""
_MOST_DEPTH = 8
_NOTHING = object()


def types_of(schema: Any, name: str) -> frozenset[str]:
    """The types that an object's JSON schema names for a property; empty if it names none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return frozenset(_named(properties.get(name), 0)) if isinstance(properties, Mapping) else frozenset()


def as_json_of_type(text: str, types: frozenset[str]) -> str:
    """A value as JSON of one of the types if possible, otherwise as a text."""
    bare = text.strip()
    value = _json(bare)
    if value is not _NOTHING and any(_is_a(value, name) for name in types - {"string"}):
        return bare
    if bare.lower() in ("true", "false") and "boolean" in types:
        return bare.lower()
    if bare in ("None", "null") and "null" in types:
        return "null"
    if types & {"array", "object"} and "string" not in types:
        value = _literal(bare)
        if any(_is_a(value, name) for name in types):
            try:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                pass
    return json.dumps(text, ensure_ascii=False)


def _named(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return set()
    kind = schema.get("type")
    found = {name for name in (kind if isinstance(kind, list) else [kind]) if name in ALL_TYPES}
    for name in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(name) or () if isinstance(schema.get(name), list) else ():
            found |= _named(option, depth + 1)
    if not found and isinstance(values := schema.get("enum"), list):
        found = {name for name in ALL_TYPES for value in values if _is_a(value, name)}
    return found


def _is_a(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return is_whole and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
    return isinstance(value, dict)


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _NOTHING


def _literal(text: str) -> Any:
    if len(text) > _MOST_LITERAL_CHARS:
        return _NOTHING
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NOTHING


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
