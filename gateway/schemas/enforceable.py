"""Change a JSON schema so that it can be enforced: what cannot be is refused, or left out and told.

Validators know keywords that the compiler of constraints lacks, and libraries emit them for ordinary types: zod for
records, pydantic for sets. Some of them say nothing, some can be written in other words.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import orjson

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES
from specdec.gateway.api.errors import cut
from specdec.gateway.schemas.formats import HINTS, KNOWN_FORMATS, PATTERNS, RANGES, fault_of_pattern
from specdec.wire.errors import InvalidRequest

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$vocabulary", "$recursiveAnchor", "externalDocs"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)
"""Keywords that allow every value. Descriptions are read from the prompt, not from the constraint."""
_SCHEMAS = frozenset(
    {
        *("additionalProperties", "additionalItems", "items", "contains", "propertyNames", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties", "anyOf", "oneOf", "allOf", "prefixItems"),
    }
)
"""Keywords whose value is a schema or a list of schemas."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has a schema for each name, which is no keyword."""
_COMBINING = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"})
_LACKING = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
)
"""Keywords that the compiler lacks."""
_OF_SETS = frozenset({"type", "items", "uniqueItems", "minItems", "maxItems"})
_BOUNDS = (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1))
"""Keywords of bounds, with the sign of those that allow more the farther they are from 0."""
_MOST_BOUND = 2**63 - 1024
"""Bound of numbers, at most: the compiler rounds to doubles and computes with 64 bits."""
_MOST_PERMUTED = 4
"""Values of a set whose permutations are written out."""
_MOST_TOLD = 1024
"""Paths that are told: a header has no room for more."""
_ADVICE = "cannot be enforced here: leave it out, or send strict: false"


def enforceable(schema: Any, path: str, *, strict: bool, unenforced: list[str]) -> Any:
    """The schema as it can be enforced, without annotations.

    Args:
        schema: a client's, as JSON values.
        path: its place in the request, for errors.
        strict: refuse what cannot be enforced; False: leave it out.
        unenforced: gets the paths of the keywords that were left out.

    Raises:
        InvalidRequest: names the path of a keyword that cannot be enforced, or of a schema that cannot be compiled.
    """
    try:
        read = _Reader(strict, unenforced).schema(path, schema)
        orjson.dumps(read)  # the compiler reads no more than 64 bits
    except (RecursionError, orjson.JSONEncodeError) as error:
        raise InvalidRequest(path, unreadable(error)) from None
    return read


def unreadable(error: Exception) -> str:
    """Why a value is too deep, or has numbers or texts, for the compiler."""
    if isinstance(error, RecursionError) or "ecursion" in str(error):
        return "is nested too deeply"
    return f"cannot be written as JSON: {error}"


class _Reader:
    """Reads one document."""

    def __init__(self, strict: bool, unenforced: list[str]) -> None:
        self._strict = strict
        self._unenforced = unenforced
        self._num_left = MAX_CONSTRAINT_BYTES
        """Bytes of copies that may be written: copies of copies would grow without end."""

    def schema(self, path: str, schema: Any) -> Any:
        """The schema at a path, changed."""
        if not isinstance(schema, Mapping):
            return schema
        if schema.get("not") == {} and "not" in schema:
            return False
        read: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS:
                continue
            if keyword == "$id" and isinstance(value, str) and value.startswith("#"):
                read["$anchor"] = value[1:]  # as drafts before 2019 wrote it
            else:
                read[keyword] = self._inner(f"{path}.{cut(keyword)}", keyword, value)
        self._format(path, read)
        self._bounds(path, read)
        self._pattern(path, read)
        self._names(path, read)
        self._unique(path, read)
        self._number_of_properties(path, read)
        self._combined(read)
        self._lacking(path, read)
        return read

    def _inner(self, path: str, keyword: str, value: Any) -> Any:
        """A keyword's value with the schemas in it changed."""
        if keyword in _SCHEMAS:
            if isinstance(value, list):
                return [self.schema(f"{path}[{index}]", each) for index, each in enumerate(value)]
            return self.schema(path, value)
        if keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            return {name: self.schema(f"{path}.{cut(name)}", each) for name, each in value.items()}
        return value

    def _leave_out(self, path: str, read: dict[str, Any], keyword: str, why: str = "") -> None:
        if keyword not in read:
            return
        at = f"{path}.{cut(keyword)}"
        if self._strict:
            raise InvalidRequest(at, f"{why or keyword} {_ADVICE}")
        del read[keyword]
        if len(self._unenforced) < _MOST_TOLD:
            self._unenforced.append(at)

    def _has_room(self, value: Any, num_copies: int) -> bool:
        """Take the room for copies of a value, if there is as much."""
        num_bytes = 0 if num_copies <= 1 else num_copies * len(orjson.dumps(value))
        if num_bytes > self._num_left:
            return False
        self._num_left -= num_bytes
        return True

    def _format(self, path: str, read: dict[str, Any]) -> None:
        name = read.get("format")
        if not isinstance(name, str):
            return
        types = read.get("type", "string")
        is_of_texts = "string" in types if isinstance(types, list) else types == "string"
        if types == "integer" and name in RANGES:
            del read["format"]
            least, most = RANGES[name]
            if "exclusiveMinimum" not in read:
                read.setdefault("minimum", least)
            if "exclusiveMaximum" not in read:
                read.setdefault("maximum", most)
        elif not is_of_texts or name in HINTS:
            del read["format"]
        elif name in KNOWN_FORMATS:
            return
        elif name in PATTERNS:
            del read["format"]
            _also(read, f"^(?:{PATTERNS[name]})$")
        else:
            self._leave_out(path, read, "format", f"the format {name[:40]!r}")

    def _bounds(self, path: str, read: dict[str, Any]) -> None:
        """Leave out, or narrow, bounds that are too far from 0 for the compiler, or that it would round."""
        types = read.get("type", "number")
        is_whole = "integer" in types and "number" not in types if isinstance(types, list) else types == "integer"
        for keyword, sign in _BOUNDS:
            bound = read.get(keyword)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            if abs(bound) <= _MOST_BOUND:
                if isinstance(bound, int):
                    read[keyword] = _as_double(bound, sign)
                continue
            if sign * bound < 0:
                problem = f"cannot be enforced here: {keyword} is at most {_MOST_BOUND}, and at least its negative"
                raise InvalidRequest(f"{path}.{keyword}", problem)
            if is_whole:
                read[keyword] = -_MOST_BOUND if sign < 0 else min(bound, 2**63 - 1)
            elif abs(bound) >= sys.float_info.max:
                del read[keyword]
            else:
                self._leave_out(path, read, keyword)

    def _pattern(self, path: str, read: dict[str, Any]) -> None:
        pattern = read.get("pattern")
        if isinstance(pattern, str) and (fault := fault_of_pattern(pattern)):
            self._leave_out(path, read, "pattern", fault)
        named = read.get("patternProperties")
        if not isinstance(named, dict):
            return
        for pattern in list(named):
            if fault := fault_of_pattern(pattern):
                self._leave_out(f"{path}.patternProperties", named, pattern, fault)

    def _names(self, path: str, read: dict[str, Any]) -> None:
        """Write the names of an object's properties as properties or patterns of them."""
        names = read.get("propertyNames")
        if names is None:
            return
        properties, others = read.get("properties") or {}, read.get("additionalProperties", True)
        allowed = _only_texts(names)
        if names is True or (isinstance(names, dict) and names in ({}, {"type": "string"})):
            del read["propertyNames"]
        elif read.get("patternProperties") or not isinstance(properties, dict):
            self._leave_out(path, read, "propertyNames")
        elif allowed is not None and self._has_room(others, len(allowed)):
            del read["propertyNames"]
            read["properties"] = {name: properties.get(name, others) for name in allowed}
            read["additionalProperties"] = False
        elif not properties and (pattern := _pattern_of(names)) is not None:
            del read["propertyNames"]
            read["patternProperties"] = {pattern: others}
            read["additionalProperties"] = False
        else:
            self._leave_out(path, read, "propertyNames")

    def _unique(self, path: str, read: dict[str, Any]) -> None:
        if read.get("uniqueItems") is not True or _bound(read.get("maxItems"), 2) <= 1:
            read.pop("uniqueItems", None)
            return
        values = _values(read.get("items"))
        is_plain = read.get("type") == "array" and set(read) <= _OF_SETS
        if not is_plain or values is None or len(values) > _MOST_PERMUTED:
            self._leave_out(path, read, "uniqueItems")
            return
        least = max(0, _bound(read.get("minItems"), 0))
        most = min(len(values), _bound(read.get("maxItems"), len(values)))
        sizes = range(least, most + 1)
        if not self._has_room(values, sum(math.perm(len(values), size) for size in sizes)):
            self._leave_out(path, read, "uniqueItems")
            return
        read.clear()
        read["enum"] = [list(some) for size in sizes for some in permutations(values, size)]

    def _number_of_properties(self, path: str, read: dict[str, Any]) -> None:
        properties, required = read.get("properties") or {}, read.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            return
        is_closed = read.get("additionalProperties") is False and not read.get("patternProperties")
        if "minProperties" in read and _bound(read["minProperties"], 1) <= len(set(map(str, required))):
            del read["minProperties"]
        if "maxProperties" in read and is_closed and _bound(read["maxProperties"], 0) >= len(properties):
            del read["maxProperties"]
        if not set(properties) <= set(map(str, required)):
            self._leave_out(path, read, "minProperties")
            self._leave_out(path, read, "maxProperties")

    @staticmethod
    def _combined(read: dict[str, Any]) -> None:
        """Write keywords in other words, or leave out what says nothing."""
        if not _COMBINING & read.keys():
            if read.get("unevaluatedProperties") is False:
                read.setdefault("additionalProperties", False)
                del read["unevaluatedProperties"]
            if read.get("unevaluatedItems") is False:
                read.setdefault("items", False)
                del read["unevaluatedItems"]
        required = read.get("required")
        pairs = read.get("dependentRequired")
        if isinstance(pairs, dict) and isinstance(required, list) and set(pairs) <= set(map(str, required)):
            named = [*required, *(name for names in pairs.values() if isinstance(names, list) for name in names)]
            if all(isinstance(name, str) for name in named):
                read["required"] = list(dict.fromkeys(named))
                del read["dependentRequired"]
        if "then" not in read and "else" not in read:
            read.pop("if", None)
        if "if" not in read:
            read.pop("then", None)
            read.pop("else", None)
        for keyword in ("unevaluatedProperties", "unevaluatedItems", "dependentRequired", "dependentSchemas"):
            if read.get(keyword) in (True, {}) and keyword in read:
                del read[keyword]
        if "contains" not in read:
            read.pop("minContains", None)
            read.pop("maxContains", None)
        if "$dynamicRef" not in read:
            read.pop("$dynamicAnchor", None)

    def _lacking(self, path: str, read: dict[str, Any]) -> None:
        for keyword in _LACKING:
            self._leave_out(path, read, keyword)


def _also(read: dict[str, Any], pattern: str) -> None:
    """Demand that a text matches one more pattern."""
    if "pattern" in read:
        others = read.get("allOf", [])
        read["allOf"] = [*others, {"pattern": pattern}] if isinstance(others, list) else others
    else:
        read["pattern"] = pattern


def _only_texts(names: Any) -> list[str] | None:
    """The texts that a schema of names lists, if it says nothing else."""
    values = _values(names)
    if values is None or not set(names) <= {"type", "enum", "const"}:
        return None
    return [value for value in values if isinstance(value, str)]


def _pattern_of(names: Any) -> str | None:
    """The pattern that a schema of names amounts to, or None."""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    told = {keyword: value for keyword, value in names.items() if keyword != "type"}
    if set(told) == {"pattern"} and isinstance(told["pattern"], str):
        return str(told["pattern"])
    if set(told) == {"format"} and isinstance(told["format"], str) and told["format"] in PATTERNS:
        return f"^(?:{PATTERNS[told['format']]})$"
    if told and set(told) <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{_bound(told.get('minLength'), 0)},{told.get('maxLength', '')}}})$"
    return None


def _values(schema: Any) -> list[Any] | None:
    """All values that a schema allows, if it lists them."""
    if not isinstance(schema, dict):
        return None
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    return [False, True] if schema == {"type": "boolean"} else None


def _as_double(bound: int, sign: int) -> int:
    """The nearest bound that is a double and allows no more."""
    near = float(bound)
    return int(math.nextafter(near, -sign * math.inf) if sign * near > sign * bound else near)


def _bound(value: Any, default: int) -> int:
    """A bound as a number; the default if it is absent or none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return int(value) if is_number else default
