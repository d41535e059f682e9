"""Schemas at random: what a mask lets through is what the schema allows, and what that allows is let through."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.constraints.grammar.follower import GrammarFollower
from tests.support.engine.grammars import EOS, TOKENIZER, compiled, follower, ids, json_schema

MOST_TOKENS = 80
NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
examples = settings(
    max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def ranges(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda pair: (min(pair), max(pair)))


LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    ranges(-999, 999).map(lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}),
    ranges(0, 6).map(lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}),
    st.lists(st.one_of(st.integers(-9, 9), NAMES, st.booleans()), min_size=1, max_size=4, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
)


def branches(below: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.dictionaries(NAMES, st.tuples(below, st.booleans()), max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in properties.items()},
            "required": [name for name, (_, is_required) in properties.items() if is_required],
            "additionalProperties": False,
        }
    )
    arrays = st.tuples(below, ranges(0, 3)).map(
        lambda each: {"type": "array", "items": each[0], "minItems": each[1][0], "maxItems": each[1][1]}
    )
    return st.one_of(objects, arrays, st.lists(below, min_size=1, max_size=3).map(lambda some: {"anyOf": some}))


SCHEMAS = st.recursive(LEAVES, branches, max_leaves=8)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiled()


def walked(grammar: GrammarFollower, rng: random.Random) -> list[int]:
    """Tokens that were allowed, drawn at random; short of white space, or it would be all there is."""
    token_ids: list[int] = []
    while len(token_ids) < MOST_TOKENS and (not token_ids or token_ids[-1] != EOS):
        mask = grammar.masks([], [])[0]
        assert mask.words is not None and mask.fault is None
        allowed = np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "nothing is allowed, not even an end"
        dark = [token for token in allowed if TOKENIZER.decode([token]).strip()]
        token = rng.choice(dark if dark and rng.random() < 0.9 else allowed)
        grammar.commit([token])
        token_ids.append(token)
    return token_ids


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@examples
def test_what_is_let_through_is_what_the_schema_allows(
    compiler: GrammarCompiler, schema: dict[str, Any], seed: int
) -> None:
    for number in range(2):
        token_ids = walked(follower(compiler, json_schema(schema)), random.Random(seed + number))
        if token_ids[-1] == EOS:
            text = TOKENIZER.decode(token_ids, skip_special_tokens=True)
            if "�" not in text:  # a part of a character, which strings may hold
                jsonschema.validate(json.loads(text), schema)


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema of these kinds allows, with properties in its order, which is the one that is let through."""
    if "anyOf" in schema:
        return st.one_of([values_of(each) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    if kind == "string":
        return st.text(min_size=schema["minLength"], max_size=schema["maxLength"])
    if kind == "array":
        return st.lists(values_of(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"])
    if kind == "object":
        left_out = st.sets(st.sampled_from(sorted(schema["properties"]))) if schema["properties"] else st.just(set())
        values = st.fixed_dictionaries({name: values_of(each) for name, each in schema["properties"].items()})
        return st.tuples(values, left_out).map(
            lambda drawn: {
                name: drawn[0][name]
                for name in schema["properties"]
                if name in schema["required"] or name not in drawn[1]
            }
        )
    return st.booleans() if kind == "boolean" else st.none()


@given(data=st.data(), schema=SCHEMAS)
@examples
def test_what_the_schema_allows_is_let_through(
    compiler: GrammarCompiler, data: st.DataObject, schema: dict[str, Any]
) -> None:
    text = json.dumps(data.draw(values_of(schema)), ensure_ascii=False)
    token_ids = [*ids(text), EOS]
    legal = follower(compiler, json_schema(schema)).legal_nodes(token_ids, range(-1, len(token_ids) - 1))
    assert all(legal), text
