"""Structural tags: text is free but behind a trigger, where it is what its tag says; what is not taken is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.rpc import code_pb2

from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.constraints.grammar.follower import GrammarFollower
from specdec.constraints.grammar.structural_tags import SpecialTokens
from specdec.constraints.limits import MAX_CONSTRAINT_BYTES, fault_of
from specdec.constraints.limits.faults import GrammarError
from specdec.v1 import common_pb2 as pb
from tests.support.engine.grammars import EOS, TOKENIZER, VOCAB_SIZE, compiled, follower, ids, wait_for
from tests.support.for_each import for_each

NUMBER: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NUMBER["additionalProperties"] = False
JSON: dict[str, Any] = {"type": "json_schema", "json_schema": NUMBER}
CALL, WRAPPED = 4096, 4097
"""Special tokens of `special`."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiled()


@pytest.fixture(scope="module")
def special() -> GrammarCompiler:
    """With the special tokens [CALL], and <wrap>, which is not marked as one but looks like it."""
    tokenizer = json.loads(TOKENIZER.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": CALL, "content": "[CALL]", "special": True, **plain},
        {"id": WRAPPED, "content": "<wrap>", "special": False, **plain},
    ]
    return GrammarCompiler(json.dumps(tokenizer), VOCAB_SIZE + 2, (EOS,))


def tag(format: Any) -> pb.Constraint:
    return pb.Constraint(structural_tag=json.dumps({"format": format}))


def triggered(*tags: Any, triggers: Any = ("<f=",), **fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **fields}


def one(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def token_ids(parts: str | list[str | int]) -> list[int]:
    parts = [parts] if isinstance(parts, str) else parts
    return [token for part in parts for token in ([part] if isinstance(part, int) else ids(part))]


def verdict(found: GrammarFollower, parts: str | list[str | int]) -> str:
    """Whether it is a whole output ("whole"), the beginning of one ("begun") or none ("no")."""
    tokens = [*token_ids(parts), EOS]
    legal = found.legal_nodes(tokens, range(-1, len(tokens) - 1))
    return "whole" if all(legal) else "begun" if all(legal[:-1]) else "no"


TWO = triggered(one("<f=a>", JSON, "</f>"), one("<f=b>", {"type": "regex", "pattern": "[a-z]+"}, ["</f>", "!"]))
ANY_TEXT = {"type": "any_text"}
CASES: dict[str, tuple[Any, dict[str, str]]] = {
    "tags behind triggers": (
        TWO,
        {
            "": "whole",
            "all of it is free <f": "whole",
            "here <f=": "begun",
            "here <f=c": "no",
            'here <f=a>{"n": 1}</f>': "whole",
            'here <f=a>{"n": 1}</f> and <f=b>xyz! é🙂\n<f=b>z</f>': "whole",
            "<f=a>no": "no",
            "<f=b>é": "no",
        },
    ),
    "excluded text": (
        {**TWO, "excludes": ["<x>", "a/b\\"]},
        {"<y>": "whole", "a <x>": "no", "a/b\\": "no", 'b<f=a>{"n": 1}</f>a<x': "whole", "<f=b>z!<x>": "no"},
    ),
    "one tag at least": (
        {**TWO, "at_least_one": True},
        {"": "begun", "free": "no", "<f=b>z! free <f=b>z!": "whole"},
    ),
    "one tag at most": (
        {**TWO, "stop_after_first": True},
        {"": "whole", "free": "whole", "free <f=b>z!": "whole", "free <f=b>z!free": "no"},
    ),
    "one tag": (
        {**TWO, "stop_after_first": True, "at_least_one": True},
        {"": "begun", "free": "no", "<f=b>z!": "whole", "<f=b>z!free": "no"},
    ),
    "two triggers": (
        triggered(one("<f=a>", JSON, ""), one("[b]", text("/"), "."), triggers=["<f=", "[b", "never"]),
        {'a[b]/.<f=a>{"n": 2}b': "whole", "[c": "whole", "[b]x": "no"},
    ),
    "a thought before them": (
        sequence(one("<think>", ANY_TEXT, "</think>"), TWO),
        {"<think>a<f=b>1": "begun", "<think>a</think>b<f=b>z!": "whole", "a": "no"},
    ),
    "tags in a tag": (
        one("<r>", TWO, ["</r>", "</s>"]),
        {"<r>a</r>": "whole", '<r>a<f=a>{"n": 1}</f>b</s>': "whole", "<r>a</r>b": "no", "<r>a": "begun"},
    ),
    "regular parts side by side": (
        sequence({"type": "regex", "pattern": "[a-z]+/"}, text("x"), {"type": "star", "content": text("yz")}),
        {"abc/x": "whole", "abx/xyzyz": "whole", "a/xy": "begun", "/x": "no"},
    ),
    "a greedy part before a text": (
        sequence({"type": "regex", "pattern": "[a-z]*"}, text("end")),
        {"end": "whole", "an end": "no", "bend": "whole", "ends": "begun"},
    ),
    "a choice": (
        {"type": "or", "elements": [JSON, text('say "\\'), {"type": "grammar", "grammar": 'start: "(" start? ")"'}]},
        {'{"n": 5}': "whole", 'say "\\': "whole", "((()))": "whole", "((": "begun", "x": "no"},
    ),
    "from two to three": (
        {"type": "repeat", "min": 2, "max": 3, "content": JSON},
        {'{"n":1}': "begun", '{"n":1}{"n":2}': "whole", '{"n":1}{"n":2}{"n":3}': "whole", '{"n":1}' * 4: "no"},
    ),
    "any number from one on": (
        {"type": "plus", "content": one("<", JSON, ">")},
        {"": "begun", '<{"n":1}>': "whole", '<{"n":1}><{"n":2}>': "whole"},
    ),
    "what may be left out": (
        sequence({"type": "optional", "content": JSON}, {"type": "repeat", "min": 0, "max": -1, "content": text("k")}),
        {"": "whole", "kk": "whole", '{"n":1}k': "whole", 'k{"n":1}': "no"},
    ),
    "a list of tags": (
        {"type": "tags_with_separator", "tags": [one("<i>", JSON, "</i>"), one("-", text("x"), "")], "separator": ", "},
        {"": "whole", '<i>{"n":1}</i>, -x': "whole", "-x, ": "begun", "-x -x": "no"},
    ),
    "one of a list": (
        {
            "type": "tags_with_separator",
            "tags": [one("-", text("x"), "")],
            "separator": ",",
            "stop_after_first": True,
            "at_least_one": True,
        },
        {"": "begun", "-x": "whole", "-x,": "no"},
    ),
    "no free text but at the end": (
        sequence(text("so: "), {"type": "any_text", "excludes": ["#"]}),
        {"so: what": "whole", "so: #": "no", "what": "no"},
    ),
}


@for_each("name", CASES)
def test_outputs_are_told_apart(name: str, compiler: GrammarCompiler) -> None:
    format, expected = CASES[name]
    found = follower(compiler, tag(format))
    assert {parts: verdict(found, parts) for parts in expected} == expected


def test_the_older_form_means_triggered_tags_of_json(compiler: GrammarCompiler) -> None:
    older = {"structures": [{"begin": "<f=a>", "schema": NUMBER, "end": "</f>"}], "triggers": ["<f="]}
    constraint = pb.Constraint(structural_tag=json.dumps({"type": "structural_tag", **older}))
    newer = tag(triggered(one("<f=a>", JSON, "</f>")))
    assert compiler.compile(constraint, b"") is compiler.compile(newer, b"")
    assert verdict(follower(compiler, constraint), 'a<f=a>{"n": 1}</f>b') == "whole"


def test_a_trigger_that_is_a_special_token_is_that_token_and_no_text(special: GrammarCompiler) -> None:
    tags = [one("[CALL]a", JSON, "\n<wrap>"), one("<wrap>", ANY_TEXT, ["</wrap>", ".[CALL]"])]
    found = follower(special, tag(triggered(*tags, triggers=["[CALL]", "<wrap>"])))
    expected: list[tuple[list[str | int], str]] = [
        (["free [CALL] <wrap> x"], "whole"),
        (["free", CALL], "begun"),
        (["free", CALL, "b"], "no"),
        (["free", CALL, 'a{"n": 1}'], "begun"),
        (["free", CALL, 'a{"n": 1}\n', WRAPPED, "free"], "whole"),
        (["free", CALL, 'a{"n": 1}\n<wrap>'], "no"),
        ([WRAPPED, "any [CALL] . thing.", CALL, "free"], "whole"),
        ([WRAPPED, "any thing", CALL], "no"),
        ([WRAPPED, "any</wrap>free", WRAPPED], "begun"),
        ([WRAPPED, WRAPPED], "no"),
    ]
    assert [verdict(found, parts) for parts, _ in expected] == [each for _, each in expected]


def test_the_same_trigger_is_text_where_the_tokenizer_has_no_such_token(compiler: GrammarCompiler) -> None:
    found = follower(compiler, tag(triggered(one("<wrap>", JSON, ""), triggers=["<wrap>"])))
    assert verdict(found, '<wrap>{"n": 1}') == "whole"
    assert verdict(found, "<wrap>x") == "no"


def test_the_longest_special_token_is_found() -> None:
    tokens = SpecialTokens({"<a>": 1, "<a>b": 2, "<ab": 3, "(": 4}, ())
    assert tokens.pieces("x<a>b<a><ab(y") == ["x", "<a>b", "<a>", "<ab", "(", "y"]
    assert tokens.pieces("<a") == ["<a"]
    assert tokens.pieces("") == [""]


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (triggered(one("x[CALL]", JSON, ""), triggers=["x[CALL]"]), "behind other text"),
        (triggered(one("<|eos|>", JSON, ""), triggers=["<|eos|>"]), "ends the output"),
        (one("a", JSON, "<|eos|>"), "ends the output"),
    ],
)
def test_special_tokens_that_cannot_be_there_are_refused(format: Any, message: str, special: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=message) as error:
        special.compile(tag(format), b"")
    assert (error.value.field, error.value.code) == ("constraint.structural_tag", code_pb2.INVALID_ARGUMENT)


def nested(depth: int) -> dict[str, Any]:
    return JSON if depth == 0 else {"type": "optional", "content": nested(depth - 1)}


REFUSED: dict[str, tuple[Any, str]] = {
    "no format": ({}, ""),
    "a type of something else": ({"type": "json_object", "format": JSON}, ".type"),
    "an unknown format": ({"format": {"type": "dispatch", "rules": []}}, ".format.type"),
    "no type": ({"format": {"value": "x"}}, ".format.type"),
    "a type that is no text": ({"format": {"type": []}}, ".format.type"),
    "a format that is none": ({"format": [1]}, ".format"),
    "an unknown field": ({"format": {**text("x"), "more": 1}}, ".format.more"),
    "fields of both forms": ({"format": JSON, "triggers": ["x"]}, ".triggers"),
    "an empty text": ({"format": text("")}, ".format.value"),
    "a schema that is none": ({"format": {"type": "json_schema", "json_schema": "x"}}, ".format.json_schema"),
    "another style": ({"format": {**JSON, "style": "qwen_xml"}}, ".format.style"),
    "any order": ({"format": {**JSON, "any_order": True}}, ".format.any_order"),
    "a flag that is none": ({"format": {**TWO, "at_least_one": 1}}, ".format.at_least_one"),
    "a budget of tokens": ({"format": {"type": "any_text", "max_tokens": 3}}, ".format.max_tokens"),
    "free text in the middle": ({"format": sequence(ANY_TEXT, JSON)}, ".format.elements[0]"),
    "free text again and again": ({"format": {"type": "star", "content": ANY_TEXT}}, ".format.content"),
    "free text without an end": ({"format": triggered(one("<f=a", ANY_TEXT, ""))}, ".format.tags[0].content"),
    "fewer than none": ({"format": {"type": "repeat", "min": -1, "max": 1, "content": JSON}}, ".format.min"),
    "less at most than at least": ({"format": {"type": "repeat", "min": 3, "max": 2, "content": JSON}}, ".format.max"),
    "too often": ({"format": {"type": "repeat", "min": 0, "max": 10**9, "content": JSON}}, ".format.max"),
    "no elements": ({"format": sequence()}, ".format.elements"),
    "no tags": ({"format": triggered()}, ".format.tags"),
    "a tag that is none": ({"format": triggered({**JSON, "begin": "<f="})}, ".format.tags[0].type"),
    "a tag without an end": ({"format": {"type": "tag", "begin": "a", "content": JSON}}, ".format.end"),
    "an end that is no text": ({"format": one("a", JSON, {"type": "token", "token": 3})}, ".format.end"),
    "an empty end among others": ({"format": one("a", JSON, ["b", ""])}, ".format.end[1]"),
    "no triggers": ({"format": triggered(one("a", JSON, ""), triggers=[])}, ".format.triggers"),
    "an empty trigger": ({"format": triggered(one("a", JSON, ""), triggers=["a", ""])}, ".format.triggers[1]"),
    "a long trigger": ({"format": triggered(one("a" * 300, JSON, ""), triggers=["a" * 300])}, ".format.triggers[0]"),
    "a trigger in another": (
        {"format": triggered(one("<f=a", JSON, ""), triggers=["<f=", "a<f=b"])},
        ".format.triggers[0]",
    ),
    "a trigger twice": ({"format": triggered(one("<f=a", JSON, ""), triggers=["<f=", "<f="])}, ".format.triggers[0]"),
    "many triggers": ({"format": triggered(JSON, triggers=[f"<{i}>" for i in range(65)])}, ".format.tags[0].type"),
    "a begin without a trigger": (
        {"format": triggered(one("<f=a", JSON, ""), one("b", JSON, ""))},
        ".format.tags[1].begin",
    ),
    "many tags": ({"format": triggered(*[one("<f=a", text("x"), "")] * 400)}, ".format.tags[255].content"),
    "deep formats": ({"format": nested(20)}, ".format" + ".content" * 16),
    "structures without triggers": ({"structures": [{"begin": "a", "schema": {}, "end": "b"}]}, ".triggers"),
    "a structure without a begin": (
        {"structures": [{"schema": {}, "end": ""}], "triggers": ["a"]},
        ".structures[0].begin",
    ),
    "a structure of something else": (
        {"structures": [{"begin": "a", "schema": 3, "end": ""}], "triggers": ["a"]},
        ".structures[0].schema",
    ),
    "many structures": (
        {"structures": [{"begin": "a", "end": ""}] * 300, "triggers": ["a"]},
        ".structures[256]",
    ),
    "half a surrogate pair": ({"format": text("\ud800")}, ""),
}  # fmt: skip


@for_each("name", REFUSED)
def test_what_is_not_taken_is_named(name: str, compiler: GrammarCompiler) -> None:
    value, path = REFUSED[name]
    fault = fault_of(pb.Constraint(structural_tag=json.dumps(value)))
    assert fault is not None
    assert fault[0] == f"constraint.structural_tag{path}"
    assert 0 < len(fault[1]) < 300


@pytest.mark.parametrize(
    "value", ["", "x", "3", "null", "[" * 30000, '{"format": NaN}', "{", '{"a":' * 9000, "1" * 5000]
)
def test_what_is_no_object_is_refused(value: str) -> None:
    fault = fault_of(pb.Constraint(structural_tag=value))
    assert fault is not None
    assert fault[0] == "constraint.structural_tag"


def test_a_large_one_is_refused() -> None:
    constraint = tag(text("x" * MAX_CONSTRAINT_BYTES))
    assert fault_of(constraint) == (
        "constraint.structural_tag",
        f"{constraint.ByteSize()} bytes are more than the limit of {MAX_CONSTRAINT_BYTES}",
    )


def test_slashes_of_a_regular_expression_do_not_end_it(compiler: GrammarCompiler) -> None:
    found = follower(compiler, tag({"type": "regex", "pattern": "a/ | /b\n"}))
    expected = {"a/ ": "whole", " /b\n": "whole", "a": "begun", "b": "no"}
    assert {parts: verdict(found, parts) for parts in expected} == expected


HOSTILE = {
    "a regular expression that doubles": {"type": "regex", "pattern": "a" + "{2}" * 60},
    "one that is none": one("a", {"type": "regex", "pattern": "("}, "b"),
    "a grammar that is none": sequence({"type": "grammar", "grammar": "start: ((("}, text("x")),
    "a grammar in itself": {"type": "grammar", "grammar": "start: @structural_tag"},
    "a schema that is none": {"type": "json_schema", "json_schema": {"type": "zzz"}},
    "a schema in itself": {"type": "json_schema", "json_schema": {"$ref": "#"}},
    "repeats of repeats": {
        "type": "repeat", "min": 1000, "max": 1000,
        "content": {"type": "repeat", "min": 1000, "max": 1000, "content": text("ab")},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_compiled_is_refused_and_the_next_one_compiles(name: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError) as error:
        wait_for(compiler.compile(tag(HOSTILE[name]), b"hostile")).result()
    assert (error.value.field, error.value.code) == ("constraint.structural_tag", code_pb2.INVALID_ARGUMENT)
    assert 0 < len(str(error.value)) < 400
    follower(compiler, tag(text(f"after {name}")))


def test_many_and_long_parts_are_compiled_or_refused(compiler: GrammarCompiler) -> None:
    triggers = [f"<{index:02}{'x' * 250}" for index in range(64)]
    tags = [
        one(trigger, {"type": "regex", "pattern": f"{index}+"}, f"{index}!") for index, trigger in enumerate(triggers)
    ]
    constraint = tag(triggered(*tags, triggers=triggers, excludes=["<" * 256] * 20))
    compilation = wait_for(compiler.compile(constraint, b""))
    assert compilation.fault or compilation.matcher
