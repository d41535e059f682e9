"""Proposal trees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.errors import TreeError
from specdec.engine.tree import MAX_TREE_NODES, ROOT, TokenTree, check_tree


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Topologically ordered lists, with equal siblings now and then."""
    parents = [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(0, 12)))]
    return [draw(st.integers(0, 3)) for _ in parents], parents


def test_a_list_of_tokens_without_parents_is_a_chain() -> None:
    tree = TokenTree([5, 6, 7])
    assert tree.parents == [ROOT, 0, 1]
    assert tree.is_chain
    assert [tree.depth(node) for node in (ROOT, 0, 1, 2)] == [0, 1, 2, 3]
    assert tree.path(2) == [0, 1, 2]
    assert tree.path(ROOT) == []


def test_only_the_leading_chain_counts_as_in_place() -> None:
    tree = TokenTree([5, 6, 7, 8], [-1, 0, 0, 2])
    assert not tree.is_chain
    assert tree.num_in_place == 2
    assert tree.path(3) == [0, 2, 3]
    assert TokenTree([5, 6], [-1, -1]).num_in_place == 1


def test_an_empty_tree_is_false_and_a_chain() -> None:
    assert not TokenTree()
    assert TokenTree().is_chain


def test_adding_an_equal_child_returns_the_one_that_is_there() -> None:
    tree = TokenTree()
    first = tree.add(ROOT, 5)
    assert tree.add(ROOT, 5) == first
    assert tree.add(first, 5) != first
    assert len(tree) == 2
    assert tree.child(ROOT, 5) == first
    assert tree.child(ROOT, 6) is None


@pytest.mark.parametrize("parent", [-2, 1, 7])
def test_adding_below_a_node_that_is_not_there_is_an_error(parent: int) -> None:
    with pytest.raises(TreeError):
        TokenTree([5]).add(parent, 6)


@pytest.mark.parametrize(
    ("token_ids", "parents", "field"),
    [
        ([1, 2], [-1], "parents"),
        ([1, 10], [-1, 0], "token_ids[1]"),
        ([-1], [-1], "token_ids[0]"),
        ([1], [0], "parents[0]"),
        ([1, 2, 3], [-1, 2, 1], "parents[1]"),
        ([1], [-2], "parents[0]"),
        ([1] * (MAX_TREE_NODES + 1), [-1] * (MAX_TREE_NODES + 1), "token_ids"),
    ],
)
def test_a_malformed_proposal_names_its_field(token_ids: list[int], parents: list[int], field: str) -> None:
    with pytest.raises(TreeError) as caught:
        check_tree(token_ids, parents, vocab_size=10)
    assert caught.value.field == field
    assert caught.value.reason


def test_a_proposal_keeps_the_indices_of_the_wire() -> None:
    check_tree([1, 1, 2], [-1, -1, 1], vocab_size=10)
    tree = TokenTree([1, 1, 2], [-1, -1, 1])
    assert (tree.token_ids, tree.parents) == ([1, 1, 2], [-1, -1, 1])
    assert tree.child(ROOT, 1) == 0


@given(node_lists())
def test_adding_merges_equal_children_and_loses_no_path(lists: tuple[list[int], list[int]]) -> None:
    wire = TokenTree(*lists)
    tree = TokenTree([0, 1])
    placed: list[int] = []
    for token, above in zip(wire.token_ids, wire.parents, strict=True):
        placed.append(tree.add(0 if above < 0 else placed[above], token))
    for node in range(len(wire)):
        below = [tree.token_ids[i] for i in tree.path(placed[node])]
        assert below == [0] + [wire.token_ids[i] for i in wire.path(node)]
    siblings = list(zip(tree.parents, tree.token_ids, strict=True))
    assert len(set(siblings)) == len(siblings)


@given(node_lists(), st.integers(-1, 11))
def test_a_subtree_holds_exactly_what_hangs_below_its_root(lists: tuple[list[int], list[int]], pick: int) -> None:
    tree = TokenTree(*lists)
    root = min(pick, len(tree) - 1)
    below, kept = tree.subtree(root)
    prefix = tree.path(root)
    descendants = [n for n in range(len(tree)) if n != root and tree.path(n)[: len(prefix)] == prefix]
    assert kept == descendants
    for moved, node in enumerate(kept):
        path = [tree.token_ids[i] for i in tree.path(node)[len(prefix) :]]
        assert [below.token_ids[i] for i in below.path(moved)] == path
    assert len(below) == len(kept)


@pytest.mark.parametrize("nodes", [[1], [0, 2], [0, 1, 3], [5], [-1]])
def test_nodes_that_do_not_hang_from_each_other_are_no_path(nodes: list[int]) -> None:
    tree = TokenTree([5, 6, 7, 8], [-1, 0, -1, 2])
    with pytest.raises(TreeError):
        tree.check_path(nodes)


@pytest.mark.parametrize("nodes", [[], [0], [0, 1], [2, 3]])
def test_a_walk_down_from_the_root_is_a_path(nodes: list[int]) -> None:
    TokenTree([5, 6, 7, 8], [-1, 0, -1, 2]).check_path(nodes)


@given(node_lists())
def test_the_chain_of_first_children_is_known_to_come_first(lists: tuple[list[int], list[int]]) -> None:
    tree, end = TokenTree(*lists), ROOT
    chain = [end := node for node, parent in enumerate(tree.parents) if parent == end]
    assert tree.is_chain_first == (chain == list(range(len(chain))))
