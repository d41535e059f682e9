"""Masks along trees: of each node what may follow it, with or without end-of-sequence, and back at the root after."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.constraints.grammar.follower import GrammarFollower, NodeMask
from specdec.constraints.limits.faults import GrammarError
from specdec.v1 import common_pb2 as pb
from tests.support.engine.grammars import EOS, TOKENIZER, compiled, follower, ids, json_schema


def allowed(mask: NodeMask) -> set[int]:
    assert mask.words is not None
    return set(np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiled()


def texts(mask: NodeMask) -> set[str]:
    return {TOKENIZER.decode([token], skip_special_tokens=False) for token in allowed(mask)}


def test_each_node_has_the_mask_of_its_own_path(compiler: GrammarCompiler) -> None:
    grammar = follower(compiler, pb.Constraint(regex="ab|cd"))
    a, b, c, d = (ids(text)[0] for text in "abcd")
    masks = grammar.masks([a, c, b, d, d], [-1, -1, 0, 1, 0])
    assert [texts(mask) for mask in masks] == [
        {"a", "ab", "c", "cd"} & texts(masks[0]),
        {"b"},
        {"d"},
        {"<|eos|>"},
        {"<|eos|>"},
        set(),
    ]
    assert texts(grammar.masks([], [])[0]) == texts(masks[0])


def test_illegal_nodes_are_told_with_all_below_them(compiler: GrammarCompiler) -> None:
    grammar = follower(compiler, pb.Constraint(regex="abc"))
    a, b, c = (ids(text)[0] for text in "abc")
    assert grammar.legal_nodes([a, b, b, c, c, EOS, a], [-1, -1, 0, 1, 2, 4, 5]) == [
        True, False, True, False, True, True, False,
    ]  # fmt: skip


def test_only_an_end_of_sequence_follows_a_complete_output(compiler: GrammarCompiler) -> None:
    grammar = follower(compiler, pb.Constraint(choice=pb.TextChoices(texts=["yes", "no"])))
    grammar.commit(ids("yes"))
    assert allowed(grammar.masks([], [])[0]) == {EOS}
    assert grammar.forced() == [EOS]
    grammar.commit([EOS])
    assert allowed(grammar.masks([], [])[0]) == set()


def test_what_is_not_allowed_cannot_be_committed(compiler: GrammarCompiler) -> None:
    grammar = follower(compiler, pb.Constraint(regex="abc"))
    with pytest.raises(GrammarError) as error:
        grammar.commit(ids("b"))
    assert error.value.field == "constraint.regex"


def test_forced_tokens_are_the_only_ones_that_are_allowed(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"const": "administrator"}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    grammar = follower(compiler, json_schema(schema))
    grammar.commit(ids('{"kind": "'))
    forced = grammar.forced()
    assert len(forced) > 1
    assert TOKENIZER.decode(forced).startswith("administrator")
    masks = grammar.masks(forced, range(-1, len(forced) - 1))
    assert [allowed(mask) for mask in masks[:-1]] == [{token} for token in forced]
    assert grammar.forced(forced[:1]) == forced[1:]


def test_the_grammar_begins_behind_its_token_which_may_stand_inside_a_tree(compiler: GrammarCompiler) -> None:
    end = ids("z")[0]
    grammar = follower(compiler, pb.Constraint(regex="ab", after_token_id=end))
    a, b = ids("a")[0], ids("b")[0]
    masks = grammar.masks([b, end, a, end, b], [-1, 0, 1, 2, 2])
    assert [masks[i].words is None for i in (0, 1)] == [True, True]
    assert "b" not in texts(masks[2])
    assert texts(masks[3]) == {"b"}
    assert allowed(masks[4]) == set()  # the second marker is inside the grammar
    grammar.commit([b, end, a])
    assert texts(grammar.masks([], [])[0]) == {"b"}


def test_an_output_is_free_before_the_grammar_only_if_it_begins_with_the_opening_token(
    compiler: GrammarCompiler,
) -> None:
    opening, end, a, b = (ids(text)[0] for text in "<zab")
    constraint = pb.Constraint(regex="ab", after_token_id=end, opening_token_id=opening)
    grammar = follower(compiler, constraint)
    masks = grammar.masks([opening, b, end, a, a, b], [-1, 0, 1, 2, -1, 4])
    assert opening in allowed(masks[0])
    assert texts(masks[0]) - {"<"} == texts(masks[3])
    assert [masks[i].words is None for i in (1, 2)] == [True, True]
    assert texts(masks[4]) == texts(masks[5]) == {"b"}
    assert allowed(masks[6]) == {EOS}
    assert grammar.legal_nodes([b, opening, a, opening], [-1, -1, -1, 2]) == [False, True, True, False]
    for output in ([opening, b, end, a], [a]):
        again = follower(compiler, constraint)
        again.commit(output)
        assert texts(again.masks([], [])[0]) == {"b"}
        assert again.forced() == [b]
    assert grammar.forced() == []
    beyond = pb.Constraint(regex="ab", after_token_id=end, opening_token_id=10**6)
    assert allowed(follower(compiler, beyond).masks([], [])[0]) == allowed(masks[0]) - {opening}


def test_min_tokens_holds_nothing_back_where_nothing_else_is_allowed(compiler: GrammarCompiler) -> None:
    grammar = follower(compiler, pb.Constraint(regex="ab?"))
    a, b = ids("a")[0], ids("b")[0]
    held = [{EOS}] * 3
    masks = grammar.masks([a, b], [-1, 0], held)
    assert [mask.must_end for mask in masks] == [False, False, True]


def test_end_of_sequence_is_held_back_while_the_grammar_can_go_on(compiler: GrammarCompiler) -> None:
    free = follower(compiler, pb.Constraint(regex="a+"))
    held = follower(compiler, pb.Constraint(regex="a{1,2}"), ignore_eos=True)
    a = ids("a")[0]
    assert EOS in allowed(free.mask_after([a]))
    assert EOS not in allowed(held.mask_after([a]))
    assert allowed(held.mask_after([a, a])) == {EOS}


def test_a_limit_met_at_a_node_is_told_there_and_costs_nothing_elsewhere(compiler: GrammarCompiler) -> None:
    """The second branch needs more states than there may be; the first one goes on."""
    grammar = follower(compiler, pb.Constraint(regex="x[ab]*a[ab]{16}c|yb"))
    x, y, b = ids("x")[0], ids("y")[0], ids("b")[0]
    before = grammar.masks([y], [-1])
    grammar.masks([x], [-1])
    assert [allowed(mask) for mask in grammar.masks([y, b], [-1, 0])][:2] == [allowed(mask) for mask in before]


def test_a_copy_is_a_place_of_its_own(compiler: GrammarCompiler) -> None:
    first, second = (follower(compiler, pb.Constraint(regex="abc")) for _ in range(2))
    first.commit(ids("a"))
    assert texts(first.masks([], [])[0]) != texts(second.masks([], [])[0])
    assert isinstance(first, GrammarFollower)


def test_a_token_beyond_a_limit_of_the_matcher_is_not_told_as_forbidden(compiler: GrammarCompiler) -> None:
    properties = {f"k{index}": {"type": "string"} for index in range(700)}
    grammar = follower(compiler, json_schema({"type": "object", "properties": properties}))
    with pytest.raises(GrammarError, match=r"cannot be followed: .* items; max is"):
        grammar.commit(ids("{"))
