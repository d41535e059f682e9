"""JSON with one value that is another, comes twice, is missing, or is none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz.cases import Case
from tests.fuzz.extremes import LONG

VALUES = (
    b"null", b"true", b"false", b"0", b"1", b"2", b"-1", b"64", b"2.5", b"-0.0", b"1e-320", b"1e308", b"1e999", b"NaN",
    b"-Infinity", b"4294967296", b"-9223372036854775809", b"9" * 30, b"9" * 4300, b"9" * 4301, b"0x1", b"01", b'""',
    b'" "', b'"1"', b'"auto"', b'"none"', b'"\\u0000\\u001b[2J"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\xff"', b'"\n"',
    b'"' + b"a" * 300 + b'"', b'"' + b"a" * LONG + b'"', b'"' + "é".encode() * LONG + b'"', b"[]", b"[null]", b"[[]]",
    b"[1,2,3]", b'["a","b"]', b"[" + b"1," * LONG + b"1]", b"[" + b"{}," * 5000 + b"{}]", b"{}", b'{"":null}',
    b'{"type":"object"}', b'{"a":1,"a":2}', b"[" * 5000, b"[" * 90 + b"]" * 90, b'{"a":' * 300 + b"0" + b"}" * 300,
    b"{", b"",
)  # fmt: skip
_PLACE = "\u2603"


def spoilt_json(rng: random.Random, case: Case, message: dict[str, Any]) -> bytes:
    """A message in which something is wrong; `message` is changed."""
    holder, key, path = rng.choice(list(_places(message, "")))
    kind = rng.random()
    if kind < 0.05:
        del holder[key]
        case.what.append(f"no {path}")
        return json.dumps(message).encode()
    value = rng.choice(VALUES)
    told = f"{value[:40]!r} of {len(value)} bytes"
    if kind < 0.1:
        case.what.append(f"unknown = {told}")
        return json.dumps(message).encode()[:-1] + b',"unknown":' + value + b"}"
    holder[key] = _PLACE
    case.what.append(f"{path} = {told}")
    data = json.dumps(message, ensure_ascii=False).encode().replace(f'"{_PLACE}"'.encode(), value)
    return data if rng.random() < 0.95 else data[: rng.randrange(len(data))]


def _places(value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Every value within one: what holds it, at which key, and its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        here = f"{path}.{key}".lstrip(".")
        yield value, key, here
        if isinstance(inner, dict | list):
            yield from _places(inner, here)
