"""Constraints are compiled apart, within bounds, and kept; what cannot be compiled says why and ends nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
from google.rpc import code_pb2

from specdec.constraints.grammar import follower as follower_module
from specdec.constraints.grammar.awaited import KnownConstraint
from specdec.constraints.grammar.compiler import Compilation, GrammarCompiler
from specdec.constraints.grammar.follower import Following
from specdec.constraints.grammar.held import HeldConstraints
from specdec.constraints.limits import MAX_CHOICES, MAX_CONSTRAINT_BYTES
from specdec.constraints.limits.faults import GrammarError
from specdec.v1 import common_pb2 as pb
from tests.support.engine.grammars import EOS, TOKENIZER, VOCAB_SIZE, compiled, follower, ids, json_schema, wait_for
from tests.support.for_each import for_each


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiled()


def chain(num_rules: int) -> str:
    rules = [f'T{index}: T{index + 1} "x"' for index in range(num_rules)]
    return "\n".join(["start: T0", *rules, f'T{num_rules}: "a"'])


def chain_of_references(num: int) -> str:
    definitions: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{num}": {"type": "string"}}})


INTERSECTION = "start: T\nT: " + " & ".join(f"/[a-z]*a[a-z]{{{i}}}/" for i in range(100))
HOSTILE: dict[str, Callable[[], pb.Constraint]] = {
    "overflows the stack by rules": lambda: pb.Constraint(grammar=chain(3000)),
    "overflows the stack by references": lambda: pb.Constraint(json_schema=chain_of_references(1500)),
    "takes minutes": lambda: pb.Constraint(grammar=INTERSECTION),
    "doubles at each level": lambda: pb.Constraint(
        grammar="\n".join(["start: T40", *(f"T{i}: T{i - 1} T{i - 1}" for i in range(1, 41)), 'T0: "a"'])
    ),
    "is a product": lambda: json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(5)]} for i in range(12)]}
    ),
    "is its own schema": lambda: json_schema({"$ref": "#"}),
    "allows nothing": lambda: json_schema(False),
    "is nested": lambda: pb.Constraint(json_schema='{"items":' * 500 + "{}" + "}" * 500),
    "is elsewhere": lambda: json_schema({"$ref": "http://127.0.0.1:9/x"}),
    "takes half a second for a mask": lambda: pb.Constraint(regex="a" + "{2}" * 60),
    "takes it behind its first token": lambda: pb.Constraint(regex="x" + "a" + "{2}" * 60),
    "looks around": lambda: pb.Constraint(regex="(?=a)b"),
    "is no regular expression": lambda: pb.Constraint(regex="(" * 3000),
    "is no grammar": lambda: pb.Constraint(grammar="start: ((("),
    "has no start": lambda: pb.Constraint(grammar='other: "a"'),
    "names what is not known": lambda: json_schema({"type": "string", "format": "zzz"}),
}


@for_each("name", HOSTILE)
def test_what_cannot_be_compiled_is_refused_and_the_next_grammar_compiles(name: str, compiler: GrammarCompiler) -> None:
    constraint = HOSTILE[name]()
    with pytest.raises(GrammarError) as error:
        wait_for(compiler.compile(constraint, b"hostile")).result()
    assert error.value.code == code_pb2.INVALID_ARGUMENT
    assert error.value.field == f"constraint.{constraint.WhichOneof('form')}"
    assert 0 < len(str(error.value)) < 400
    follower(compiler, pb.Constraint(regex=f"after {list(HOSTILE).index(name)}"))


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (pb.Constraint(), "constraint"),
        (pb.Constraint(after_token_id=3), "constraint"),
        (pb.Constraint(json_object=False), "constraint.json_object"),
        (pb.Constraint(regex=""), "constraint.regex"),
        (pb.Constraint(regex="a" * MAX_CONSTRAINT_BYTES), "constraint.regex"),
        (pb.Constraint(choice=pb.TextChoices()), "constraint.choice.texts"),
        (pb.Constraint(choice=pb.TextChoices(texts=["a"] * (MAX_CHOICES + 1))), "constraint.choice.texts"),
        (pb.Constraint(choice=pb.TextChoices(texts=["a", ""])), "constraint.choice.texts[1]"),
        (pb.Constraint(json_schema="{"), "constraint.json_schema"),
        (pb.Constraint(json_schema="3"), "constraint.json_schema"),
        (pb.Constraint(json_schema="[" * 30000), "constraint.json_schema"),
    ],
)
def test_what_can_be_seen_at_once_is_refused_at_once(
    constraint: pb.Constraint, field: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError) as error:
        compiler.compile(constraint, b"")
    assert error.value.field == field


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = wait_for(compiler.compile(pb.Constraint(regex="once"), b"one"))
    assert compiler.compile(pb.Constraint(regex="once"), b"two") is first
    assert compiler.compile(pb.Constraint(grammar="once"), b"two") is not first


def test_what_was_used_least_lately_is_forgotten(compiler: GrammarCompiler) -> None:
    first = wait_for(compiler.compile(pb.Constraint(regex="first"), b""))
    for index in range(40):
        wait_for(compiler.compile(pb.Constraint(regex=f"filler {index}"), b""))
    assert compiler.compile(pb.Constraint(regex="first"), b"") is not first


def test_too_many_at_once_are_refused_and_tenants_take_turns() -> None:
    own = compiled()
    flood = []
    with pytest.raises(GrammarError) as error:
        for index in range(2000):
            flood.append(own.compile(pb.Constraint(regex=f"flood {index}"), b"many"))
    assert error.value.code == code_pb2.RESOURCE_EXHAUSTED
    wait_for(flood[0])
    other = wait_for(own.compile(pb.Constraint(regex="other"), b"few"))
    assert other.result() is not None
    assert not all(each.is_done for each in flood)


def test_a_tokenizer_without_an_end_has_no_grammars() -> None:
    with pytest.raises(ValueError, match="ends a sequence"):
        GrammarCompiler("{}", 10, ())


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE - 3])
def test_a_tokenizer_may_have_more_tokens_than_the_model(vocab_size: int) -> None:
    """As Gemma 3's, whose embedding lacks the token of images."""
    tokenizer = json.loads(TOKENIZER.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": VOCAB_SIZE, "content": "<image>", **flags})
    if vocab_size < VOCAB_SIZE:
        last = {token for token, token_id in tokenizer["model"]["vocab"].items() if token_id >= vocab_size}
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [pair for pair in merges if "".join(pair) not in last]
    compiler = GrammarCompiler(json.dumps(tokenizer), vocab_size, (EOS,))
    told = follower(compiler, pb.Constraint(choice=pb.TextChoices(texts=["red", "<image>"])))
    told.commit(ids("red"))
    assert [each for each in range(vocab_size) if told.legal_nodes([each], [-1]) == [True]] == [EOS]


def test_choices_are_taken_literally(compiler: GrammarCompiler) -> None:
    texts = ['say "hi"', "back\\slash", "(a|b)*", "line\nbreak", "ünïcode ✓"]
    grammar = pb.Constraint(choice=pb.TextChoices(texts=texts))
    for text in texts:
        follower(compiler, grammar).commit(ids(text))


OVERLAPPING = {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "maxLength": 2}]}


def test_one_of_schemas_that_exclude_each_other_compiles(compiler: GrammarCompiler) -> None:
    found = follower(compiler, json_schema({"oneOf": [{"type": "boolean"}, {"type": "integer"}]}))
    assert found.legal_nodes(ids("true"), range(-1, len(ids("true")) - 1)) == [True] * len(ids("true"))


def test_one_of_schemas_that_overlap_is_refused_with_what_to_do_and_taken_as_any_of_when_told(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(GrammarError, match=r"oneOf .* \"x-guidance\": \{\"coerce_one_of\": true\}") as error:
        wait_for(compiler.compile(json_schema({"properties": {"a": OVERLAPPING}}), b"")).result()
    assert (error.value.field, error.value.code) == ("constraint.json_schema", code_pb2.INVALID_ARGUMENT)
    follower(compiler, json_schema({**OVERLAPPING, "x-guidance": {"coerce_one_of": True}}))


def test_a_tenant_that_holds_many_constraints_is_refused_and_others_and_those_that_end_are_not() -> None:
    compiler = GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, (EOS,), most_bytes=16 * 2**20)

    def compile(number: int, tenant: bytes) -> Compilation:
        compilation = compiler.compile(pb.Constraint(choice=pb.TextChoices(texts=[f"a{number}", "b"])), tenant)
        assert compilation.done.wait(60)
        return compilation

    for number in range(200):  # what nobody uses gives way
        assert not compile(number, b"passing").fault
    held = [compile(number, b"greedy") for number in range(1000, 1200)]
    refused = [compilation for compilation in held if compilation.fault]
    assert refused and {compilation.code for compilation in refused} == {code_pb2.RESOURCE_EXHAUSTED}
    assert 2 <= len(held) - len(refused) <= 64
    assert not compile(2000, b"polite").fault
    num_held = len(held) - len(refused)
    del refused
    held.clear()
    again = [compile(number, b"greedy") for number in range(3000, 3000 + num_held // 2)]
    assert not any(compilation.fault for compilation in again)


BLOWS_UP = pb.Constraint(regex="([a-z ]*a[a-z ]{12})*")
"""Its automaton has 2**12 states and more, which come into being as texts reach them."""


def walk(compiler: GrammarCompiler, tenant: bytes, seed: int, num_steps: int) -> GrammarError | None:
    """Follow random texts; returns the fault that ended it."""
    constraint = KnownConstraint(
        wait_for(compiler.compile(BLOWS_UP, tenant)),
        Following(
            vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], after_token_id=None, opening_token_id=None, holds_back_eos=True
        ),
    )
    follower, rng = constraint.follower(), random.Random(seed)
    for _ in range(num_steps):
        (mask,) = follower.masks((), ())
        if mask.fault is not None:
            return mask.fault
        assert mask.words is not None
        allowed = np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")[:VOCAB_SIZE])
        follower.commit([int(rng.choice(allowed))])
    return None


def test_what_a_constraint_grows_to_while_it_is_used_counts_and_what_it_may_not_have_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_module, "_WEIGHED_CALLS", 1)
    large = GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, (EOS,))
    assert walk(large, b"greedy", 1, 300) is None
    small = GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, (EOS,), most_bytes=2 * 2**20)
    other = wait_for(small.compile(pb.Constraint(regex="b+"), b"greedy"))
    fault = walk(small, b"greedy", 1, 300)
    assert fault is not None
    assert (fault.field, fault.code) == ("constraint.regex", code_pb2.RESOURCE_EXHAUSTED)
    assert "of the tenant's constraints are in use, the limit is 512 KiB" in str(fault)
    assert other.matcher is not None
    assert not wait_for(small.compile(pb.Constraint(regex="c+"), b"polite")).fault


def test_samples_of_growth_stand_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_WEIGHED_CALLS", 4)  # with 32, one run of 16 has no sample
    held = HeldConstraints(2**30)
    told = []
    for seed in range(2):
        compiler = GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, (EOS,))
        compiler._held = held
        wait_for(compiler.compile(BLOWS_UP, b"%d" % seed))
        before = held._num_bytes[b"%d" % seed]
        for walked in range(4):
            assert walk(compiler, b"%d" % seed, walked, 400) is None
        told.append(held._num_bytes[b"%d" % seed] - before)
    assert max(told) <= 24 * 2**20
    assert sum(told) > 2**17


def test_who_names_a_new_tenant_for_each_constraint_has_a_bound_too() -> None:
    held, owners = HeldConstraints(2**20), [_Owner() for _ in range(100)]
    refused = 0
    for number, owner in enumerate(owners):
        if held.refusal(b"%d" % number, 1):
            refused += 1
        else:
            held.hold(owner, b"%d" % number, 1)
    assert refused == 92
    del owner
    owners.clear()
    assert not held._num_bytes


class _Owner:
    """What holds a constraint."""
