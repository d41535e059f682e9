"""Sessions with constraints, decoded by the shipped pair in this process."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from specdec.v1 import common_pb2 as pb
from tests.support.engine.grammars import TOKENIZER
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.outcomes import Outcome

_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}


def record(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {**_OBJECT, "properties": properties, "required": list(properties)}


_TEXT = {"type": "string", "maxLength": 6}
_POINT = record(x={"type": "integer", "minimum": -9, "maximum": 9}, y={"type": "integer", "minimum": -9, "maximum": 9})
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": _TEXT,
    "integer": {"type": "integer", "minimum": 0, "maximum": 999},
    "negative": {"type": "integer", "minimum": -50, "maximum": -3},
    "number": {"type": "number", "minimum": 0, "maximum": 10},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "constant": {"const": {"name": "the constant", "values": [1, 2, 3]}},
    "enumeration": {"enum": ["red", "green", 3, None, {"a": 1}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    "filled array": {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [_TEXT, {"type": "boolean"}], "items": False, "minItems": 2},
    "record": record(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional property": {**_OBJECT, "properties": {"a": {"type": "boolean"}, "b": _TEXT}, "required": ["a"]},
    "nested": record(start=_POINT, end=_POINT),
    "array of records": {"type": "array", "items": _POINT, "minItems": 1, "maxItems": 2},
    "record of arrays": record(tags={"type": "array", "items": _TEXT, "maxItems": 2}),
    "either": {"anyOf": [{"type": "boolean"}, record(error=_TEXT)]},
    "all of": {"allOf": [record(a={"type": "boolean"}), {"type": "object"}]},
    "definition": {"$ref": "#/$defs/point", "$defs": {"point": _POINT}},
    "recursion": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(leaf={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    },
    "long names": record(the_first_of_the_long_names={"type": "boolean"}, the_second_of_the_long_names=_TEXT),
    "tagged": {"anyOf": [record(kind={"const": "circle"}, r=_POINT), record(kind={"const": "none"})]},
    "nullable": record(value={"type": ["integer", "null"], "minimum": 0, "maximum": 99}),
    "further properties": {
        "type": "object",
        "properties": {"id": {"type": "boolean"}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "unicode": record(größe={"enum": ["groß", "klein", "✓"]}),
}
"""Schemas by the feature that they test."""
TEXTS: dict[str, pb.Constraint] = {
    "one of several": pb.Constraint(choice=pb.TextChoices(texts=["positive", "negative", "neutral"])),
    "one": pb.Constraint(choice=pb.TextChoices(texts=["the only answer there is"])),
    "telephone": pb.Constraint(regex=r"\(\d{3}\) \d{3}-\d{4}"),
    "words": pb.Constraint(regex="[a-z]{2,5}( [a-z]{2,5}){2}"),
    "either way": pb.Constraint(regex="(yes|no)[.!]?"),
    "sum": pb.Constraint(grammar='start: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'),
    "list": pb.Constraint(grammar='start: item item?\nitem: "- " /[a-z ]{3,8}/ "\\n"'),
}


def constrained(
    constraint: pb.Constraint,
    *,
    prompt: int = 0,
    verify_mode: pb.VerifyMode.ValueType = pb.VERIFY_MODE_COUPLED,
    body: dict[str, Any] | None = None,
    **sampling: Any,
) -> pb.OpenSession:
    """A session with a constraint; 120 tokens at most."""
    return open_session(
        prompts()[prompt][:40],
        verify_mode=verify_mode,
        body=body,
        **{"max_tokens": 120, "seed": 5, **sampling, "constraint": constraint},
    )


def text_of(outcome: Outcome) -> str:
    """Text of the output, without special tokens."""
    return TOKENIZER.decode(outcome.token_ids, skip_special_tokens=True)


def check_schema(outcome: Outcome, schema: dict[str, Any]) -> None:
    """Check that the output ended by itself and is JSON that the schema allows."""
    assert outcome.error is None
    assert outcome.finish_reason == pb.FINISH_REASON_STOP
    jsonschema.validate(json.loads(text_of(outcome)), schema)


def check_all(outcomes: dict[str, Outcome]) -> None:
    """Check every output by the schema of its name; at most a fifth may reach `max_tokens` first."""
    for name, outcome in outcomes.items():
        assert outcome.error is None
        if outcome.finish_reason == pb.FINISH_REASON_STOP:
            check_schema(outcome, SCHEMAS[name])
    num_ended = sum(outcome.finish_reason == pb.FINISH_REASON_STOP for outcome in outcomes.values())
    assert num_ended >= 0.8 * len(SCHEMAS)


def plainly(pair: LocalPair, bodies: dict[str, pb.OpenSession]) -> dict[str, Outcome]:
    """Outcomes of the same sessions without proposals."""
    plain = {}
    for session_id, body in bodies.items():
        plain[session_id] = pb.OpenSession()
        plain[session_id].CopyFrom(body)
        plain[session_id].speculate = False
        plain[session_id].fork_from = ""
    pair.reset()
    outcomes = pair.run(plain, use_draft=False)
    assert all(outcome.num_verified == 0 for outcome in outcomes.values())
    pair.reset()
    return outcomes
