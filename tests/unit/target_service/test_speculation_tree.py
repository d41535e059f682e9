"""The tree of proposals below a session's last committed token: merging, advancing, limits, and what is refused."""

from __future__ import annotations

import random

import pytest
from google.rpc import code_pb2
from hypothesis import given
from hypothesis import strategies as st

from specdec.replica.worker.errors import SessionFailure
from specdec.target_service.tree.proposed import DEFAULT_SCORE
from specdec.target_service.tree.speculation_tree import SpeculationTree
from specdec.v1 import common_pb2 as pb
from tests.support.for_each import for_each

COMMITTED = [10, 11, 12]


def proposal(token_ids: list[int], parents: list[int] | None = None, start: int = 3, **fields: object) -> pb.Proposal:
    return pb.Proposal(start_position=start, token_ids=token_ids, parents=parents or [], **fields)  # type: ignore[arg-type]


def tree_of(*proposals: pb.Proposal, committed: list[int] | None = None) -> SpeculationTree:
    tree = SpeculationTree(vocab_size=100)
    for each in proposals:
        tree.merge(each, committed or COMMITTED)
    return tree


def shape(tree: SpeculationTree) -> tuple[list[int], list[int]]:
    assert len(tree.nodes) == len(tree.tokens) == len(tree)
    return tree.tokens.token_ids, tree.tokens.parents


def test_a_proposal_without_parents_is_a_chain() -> None:
    assert shape(tree_of(proposal([1, 2, 3]))) == ([1, 2, 3], [-1, 0, 1])


def test_a_node_has_the_name_that_a_draft_without_a_model_gives_it() -> None:
    names = {"drafters": ["suffix", "rm -rf"], "proposed_by": bytes([0, 1])}
    tree = tree_of(proposal([1, 2], **names))
    tree.hang("ngram", [4], [-1], [0.5])
    tree.merge(proposal([4, 5], drafters=["openai_api"], proposed_by=bytes(2)), COMMITTED)
    # A name that nobody knows is no label; what the target's own drafter offered first is the draft's, which stays.
    assert [node.origin for node in tree.nodes] == ["suffix", "draft_model", "openai_api", "openai_api"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafters": ["suffix"]},
        {"drafters": ["suffix"], "proposed_by": bytes([0])},
        {"drafters": ["suffix"], "proposed_by": bytes([0, 1])},
        {"proposed_by": bytes([0, 1])},
    ],
)
def test_names_that_fit_no_node_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SessionFailure) as caught:
        tree_of(proposal([1, 2], **wrong))
    assert caught.value.field == "proposal.proposed_by"


def test_a_repeated_proposal_adds_nothing() -> None:
    tree = tree_of(proposal([1, 2]), proposal([1, 2]), proposal([1, 2]))
    assert shape(tree) == ([1, 2], [-1, 0])
    assert tree.num_stale == 0


def test_proposals_share_what_they_have_in_common() -> None:
    tree = tree_of(proposal([1, 2, 3]), proposal([1, 2, 4, 5]), proposal([9]))
    assert shape(tree) == ([1, 2, 3, 4, 5, 9], [-1, 0, 1, 1, 3, -1])


def test_equal_siblings_within_one_proposal_become_one() -> None:
    assert shape(tree_of(proposal([1, 1, 2, 3], [-1, -1, 0, 1]))) == ([1, 2, 3], [-1, 0, 0])


def test_a_proposal_from_behind_is_walked_along_what_was_committed_since() -> None:
    tree = tree_of(proposal([11, 12, 1, 2], start=1))
    assert shape(tree) == ([1, 2], [-1, 0])
    assert tree.num_stale == 2


def test_branches_off_the_committed_path_are_stale() -> None:
    tree = tree_of(proposal([50, 12, 1, 51, 2], [-1, -1, 1, 1, 2], start=2))
    assert shape(tree) == ([1, 51, 2], [-1, -1, 0])
    assert tree.num_stale == 2


def test_a_proposal_that_contradicts_the_committed_path_is_all_stale() -> None:
    tree = tree_of(proposal([11, 50, 1], start=1))
    assert len(tree) == 0
    assert tree.num_stale == 3


def test_a_proposal_that_was_overtaken_entirely_is_stale() -> None:
    tree = tree_of(proposal([11], start=1))
    assert len(tree) == 0
    assert tree.num_stale == 1


def test_scores_and_distributions_stay_with_their_nodes() -> None:
    sparse = [pb.SparseDistribution(token_ids=[token, 7], probs=[0.75, 0.25]) for token in (11, 12, 1, 2)]
    tree = tree_of(proposal([11, 12, 1, 2], start=1, scores=bytes([0, 51, 102, 255]), distributions=sparse))
    assert [node.score for node in tree.nodes] == [102 / 255, 1.0]
    assert [node.token_ids for node in tree.nodes] == [(1, 7), (2, 7)]
    assert tree.nodes[0].probs == (0.75, 0.25)


def test_the_first_proposal_of_a_node_decides_its_score() -> None:
    tree = tree_of(proposal([1], scores=bytes([51])), proposal([1, 2], scores=bytes([255, 255])))
    assert [node.score for node in tree.nodes] == [0.2, 1.0]
    assert tree_of(proposal([1])).nodes[0].score == DEFAULT_SCORE


def test_a_full_tree_takes_no_more_nodes_but_stays_a_tree() -> None:
    tree = tree_of(proposal(list(range(60))), proposal([0, 70, 71, 72, 73, 74, 75]), proposal([99]))
    token_ids, parents = shape(tree)
    assert len(token_ids) == 64
    assert token_ids[60:] == [70, 71, 72, 73]
    assert parents[60:] == [0, 60, 61, 62]


def test_committed_tokens_keep_what_hangs_below_them() -> None:
    tree = tree_of(proposal([1, 5, 2, 6, 3], [-1, -1, 0, 1, 2]))
    assert tree.advance([1]) == 2
    assert shape(tree) == ([2, 3], [-1, 0])
    assert tree.advance([2, 3]) == 0
    assert len(tree) == 0


def test_a_commit_off_the_tree_clears_it_and_counts_what_was_wasted() -> None:
    tree = tree_of(proposal([1, 2, 3]))
    assert tree.advance([1, 9]) == 2
    assert len(tree) == 0


def test_payloads_follow_their_nodes_when_the_tree_advances() -> None:
    tree = tree_of(proposal([1, 5, 2, 6], [-1, -1, 0, 0], scores=bytes([10, 20, 30, 40])))
    tree.advance([1])
    assert [round(node.score * 255) for node in tree.nodes] == [30, 40]


def test_selected_nodes_keep_their_order_and_hang_as_before() -> None:
    tree = tree_of(proposal([1, 5, 2, 6, 3], [-1, -1, 0, 1, 2]))
    selected, order = tree.select([0, 2, 4])
    assert (selected.token_ids, selected.parents) == ([1, 2, 3], [-1, 0, 1])
    assert order == [0, 2, 4]


def test_a_whole_tree_that_is_verified_stays_what_it_was_when_its_session_goes_on() -> None:
    tree = tree_of(proposal([1, 2, 5], [-1, 0, -1]))
    verified, chosen = tree.select([0, 1, 2])
    before = tree.hung()
    tree.advance([1])
    tree.merge(proposal([2, 9, 8], [-1, 0, 0], start=len(COMMITTED) + 1), [*COMMITTED, 1])
    assert shape(tree) == ([2, 9, 8], [-1, 0, 0])
    assert (verified.token_ids, verified.parents, chosen) == ([1, 2, 5], [-1, 0, -1], [0, 1, 2])
    assert (before.tokens.token_ids, len(before.nodes)) == ([1, 2, 5], 3)


def test_what_hung_without_nodes_is_not_what_hangs_later() -> None:
    tree = tree_of()
    before = tree.hung()
    tree.merge(proposal([1, 2]), COMMITTED)
    assert (len(before.tokens), before.nodes) == (0, [])


def test_selected_first_children_come_first_so_that_their_kv_is_in_place() -> None:
    tree = tree_of(proposal([1, 5, 6, 2, 7, 3], [-1, -1, 1, 0, 0, 3]))
    selected, order = tree.select([0, 1, 2, 3, 4, 5])
    assert order == [0, 3, 5, 1, 2, 4]
    assert (selected.token_ids, selected.parents) == ([1, 2, 3, 5, 6, 7], [-1, 0, 1, -1, 3, 0])
    assert selected.num_in_place == 3


def test_merging_later_equals_advancing_first() -> None:
    """A late proposal gives the tree that it would have given in time."""
    rng = random.Random(0)
    for _ in range(200):
        num_nodes = rng.randrange(1, 30)
        offered = proposal(
            [rng.randrange(3) for _ in range(num_nodes)], [rng.randrange(-1, max(1, node)) for node in range(num_nodes)]
        )
        if any(parent >= node for node, parent in enumerate(offered.parents)):
            continue
        new = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        early = tree_of(offered)
        early.advance(new)
        late = tree_of(offered, committed=[*COMMITTED, *new])
        assert _paths(early) == _paths(late)


def chain_of(*tokens: int, start: int = 3) -> pb.Proposal:
    """A chain with a distribution for each token, which tells which proposal it came with."""
    sparse = [pb.SparseDistribution(token_ids=[token, 90 + len(tokens)], probs=[0.75, 0.25]) for token in tokens]
    return proposal(list(tokens), start=start, distributions=sparse)


def test_for_rejection_verification_the_chain_that_came_first_stays_and_only_grows_at_its_end() -> None:
    tree = SpeculationTree(vocab_size=100, is_chain=True)
    for offered in (chain_of(1, 2), chain_of(3, 4, 5), chain_of(1, 6, 7), chain_of(1, 2, 8), chain_of(1, 9, 8, 9)):
        tree.merge(offered, COMMITTED)
    assert shape(tree) == ([1, 2, 8], [-1, 0, 1])
    assert [node.token_ids for node in tree.nodes] == [(1, 92), (2, 92), (8, 93)]


def test_for_rejection_verification_a_late_chain_is_walked_along_what_was_committed_since() -> None:
    tree = SpeculationTree(vocab_size=100, is_chain=True)
    tree.merge(chain_of(11, 50, start=1), COMMITTED)
    assert len(tree) == 0
    tree.merge(chain_of(11, 12, 1, start=1), COMMITTED)
    assert shape(tree) == ([1], [-1])


@pytest.mark.parametrize(
    ("offered", "field"),
    [
        (proposal([1, 2], [-1, -1], distributions=chain_of(1, 2).distributions), "proposal.parents"),
        (proposal([1, 2], distributions=chain_of(1).distributions), "proposal.distributions"),
        (proposal([1, 2]), "proposal.distributions"),
    ],
)
def test_for_rejection_verification_trees_and_bare_tokens_are_refused(offered: pb.Proposal, field: str) -> None:
    with pytest.raises(SessionFailure) as refused:
        SpeculationTree(vocab_size=100, is_chain=True).merge(offered, COMMITTED)
    assert refused.value.field == field


def continued(main: list[int], *continuations: tuple[int, list[int]], start: int = 3) -> pb.Proposal:
    """A chain, and chains below other tokens: each with the node after which it comes."""
    offered = chain_of(*main, start=start)
    for parent, tokens in continuations:
        distributions = chain_of(*tokens).distributions[1:]
        offered.continuations.add(parent=parent, token_ids=tokens, distributions=distributions)
    return offered


def test_corrections_hang_beside_drawn_tokens_and_become_the_chain_where_they_are_committed() -> None:
    tree = SpeculationTree(vocab_size=100, is_chain=True)
    for _ in range(2):  # a repeated one adds nothing
        tree.merge(continued([1, 2], (-1, [5, 6, 7]), (0, [8, 9])), COMMITTED)
        assert shape(tree) == ([1, 2, 5, 6, 7, 8, 9], [-1, 0, -1, 2, 3, 0, 5])
    assert [node.is_drawn for node in tree.nodes] == [True, True, False, True, True, False, True]
    assert tree.lasting_depth == 2, "what can be verified"
    assert sum(tree.num_hung.values()) == 7
    assert tree.advance([1, 8]) == 4
    assert shape(tree) == ([9], [-1])
    assert tree.lasting_depth == 1


def test_a_drawn_token_is_verified_whether_or_not_it_was_expected_as_a_correction() -> None:
    """Else whether a token is verified would depend on which one was drawn. Only the first drawn one counts."""
    tree = SpeculationTree(vocab_size=100, is_chain=True)
    tree.merge(continued([], (-1, [5, 6])), COMMITTED)
    assert tree.lasting_depth == 0
    tree.merge(chain_of(5, 7), COMMITTED)
    assert tree.nodes[0].is_drawn
    assert tree.lasting_depth == 2, "the chain below it came first and stays"
    tree.merge(chain_of(4, 7), COMMITTED)
    assert shape(tree) == ([5, 6], [-1, 0])


@for_each(
    "bad, field",
    [
        (continued([1, 2], (2, [5, 6])), "proposal.continuations[0].parent"),
        (continued([1, 2], (-2, [5, 6])), "proposal.continuations[0].parent"),
        (continued([1], (-1, [5, 6]), (4, [5, 6])), "proposal.continuations[1].parent"),
        (continued([1], (-1, [])), "proposal.continuations[0].token_ids"),
        (continued([1], (-1, list(range(64)))), "proposal.continuations[0].token_ids"),
        (continued([1], (-1, [100, 6])), "proposal.continuations[0].token_ids"),
        (
            proposal([], continuations=[pb.Continuation(parent=-1, token_ids=[5, 6])]),
            "proposal.continuations[0].distributions",
        ),
        (
            proposal(
                [],
                continuations=[pb.Continuation(parent=-1, token_ids=[5, 6], distributions=chain_of(7).distributions)],
            ),
            "proposal.continuations[0].distributions[0]",
        ),
    ],
)
def test_a_continuation_that_hangs_nowhere_or_has_no_sound_distributions_is_refused(
    bad: pb.Proposal, field: str
) -> None:
    with pytest.raises(SessionFailure) as refused:
        SpeculationTree(vocab_size=100, is_chain=True).merge(bad, COMMITTED)
    assert str(refused.value).startswith(field) or refused.value.field == field


def test_coupled_verification_takes_no_continuations() -> None:
    with pytest.raises(SessionFailure) as refused:
        SpeculationTree(vocab_size=100).merge(continued([1], (-1, [5, 6])), COMMITTED)
    assert refused.value.field == "proposal.continuations"


def _paths(tree: SpeculationTree) -> set[tuple[int, ...]]:
    ids = tree.tokens.token_ids
    return {tuple(ids[node] for node in tree.tokens.path(last)) for last in range(len(tree))}


@for_each(
    "bad, named",
    [
        (proposal([1, 2], [1, 0]), "proposal.parents[0]"),
        (proposal([1, 2], [-1, 1]), "proposal.parents[1]"),
        (proposal([1, 2], [-1, -2]), "proposal.parents[1]"),
        (proposal([1, 2], [-1]), "proposal.parents"),
        (proposal([1, 100]), "proposal.token_ids[1]"),
        (proposal([1] * 65), "proposal.token_ids"),
        (proposal([1], start=4), "proposal.start_position"),
        (proposal([1], start=0), "proposal.start_position"),
        (proposal([1, 2], scores=b"1"), "proposal.scores"),
        (proposal([1, 2], distributions=[pb.SparseDistribution(token_ids=[1], probs=[1])]), "proposal.distributions"),
        (proposal([1], distributions=[pb.SparseDistribution(token_ids=[2], probs=[1])]), "proposal.distributions[0]"),
        (proposal([1], distributions=[pb.SparseDistribution(token_ids=[1], probs=[-1])]), "proposal.distributions[0]"),
    ],
)
def test_a_malformed_proposal_is_refused_with_the_name_of_the_field_and_changes_nothing(
    bad: pb.Proposal, named: str
) -> None:
    tree = tree_of(proposal([1, 2]))
    with pytest.raises(SessionFailure) as refused:
        tree.merge(bad, COMMITTED)
    assert str(refused.value).startswith(f"{named}:")
    assert refused.value.code == code_pb2.INVALID_ARGUMENT
    assert shape(tree) == ([1, 2], [-1, 0])
    assert tree.num_stale == 0


def test_a_proposal_past_the_committed_tokens_says_where_one_may_start() -> None:
    with pytest.raises(SessionFailure) as refused:
        tree_of(proposal([1], start=9))
    assert refused.value.expected_position == 3


@st.composite
def offers(draw: st.DrawFn) -> list[tuple[int, list[int], list[int]]]:
    """Proposals over few tokens, so that they overlap, repeat siblings and follow what was committed."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        token_ids = draw(st.lists(st.integers(0, 2), max_size=16))
        parents = [draw(st.integers(-1, index - 1)) for index in range(len(token_ids))]
        found.append((draw(st.integers(1, 4)), token_ids, parents))
    return found


@given(committed=st.lists(st.integers(0, 2), min_size=4, max_size=4), proposals=offers())
def test_a_tree_has_the_paths_of_all_proposals_that_go_on_from_what_is_committed_and_no_others(
    committed: list[int], proposals: list[tuple[int, list[int], list[int]]]
) -> None:
    tree = SpeculationTree(vocab_size=3)
    expected: set[tuple[int, ...]] = set()
    num_stale = 0
    for start, token_ids, parents in proposals:
        tree.merge(proposal(token_ids, parents, start), committed)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(token_ids, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        walked = tuple(committed[start:])
        below = [path[len(walked) :] for path in paths if len(path) > len(walked) and path[: len(walked)] == walked]
        expected |= set(below)
        num_stale += len(paths) - len(below)
    found = [tuple(tree.tokens.token_ids[node] for node in tree.tokens.path(leaf)) for leaf in range(len(tree))]
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert tree.num_stale == num_stale


class OneByOne(SpeculationTree):
    """Places every node for itself."""

    def _replace(self, *_proposal: object) -> bool:
        return False


@st.composite
def growing(draw: st.DrawFn) -> list[tuple[int, list[int], list[int], bytes]]:
    """Proposals of a draft that adds to its tree, and begins anew now and then; some have equal siblings."""
    found: list[tuple[int, list[int], list[int], bytes]] = []
    token_ids: list[int] = []
    parents: list[int] = []
    start = draw(st.integers(1, 4))
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 3)) == 0:
            start, token_ids, parents = draw(st.integers(1, 4)), [], []
        for _ in range(draw(st.integers(0, 8))):
            parents = [*parents, draw(st.integers(-1, len(parents) - 1))]
            token_ids = [*token_ids, draw(st.integers(0, 3))]
        has_scores = draw(st.booleans())
        found.append((start, token_ids, parents, draw(st.binary(min_size=len(parents), max_size=len(parents)))))
        if not has_scores:
            found[-1] = (*found[-1][:3], b"")
    return found


@given(committed=st.lists(st.integers(0, 3), min_size=4, max_size=7), proposals=growing(), offers=st.booleans())
def test_a_tree_that_is_taken_over_whole_is_the_one_merged_node_by_node(
    committed: list[int], proposals: list[tuple[int, list[int], list[int], bytes]], offers: bool
) -> None:
    trees = SpeculationTree(vocab_size=4), OneByOne(vocab_size=4)
    for number, (start, token_ids, parents, scores) in enumerate(proposals):
        known = committed[: 4 + number]
        for tree in trees:
            if offers and number == 1:
                tree.hang("ngram", [1, 2], [-1, 0], [0.5, 0.25])
            tree.merge(proposal(token_ids, parents, start, scores=scores), known)
            if number % 2:
                tree.advance(committed[4 + number : 5 + number])
                tree.drop_local()
        whole, single = trees
        assert shape(whole) == shape(single)
        assert whole.nodes == single.nodes
        assert (whole.num_stale, whole.num_hung) == (single.num_stale, single.num_hung)
        assert (whole.lasting_depth, whole.is_local) == (single.lasting_depth, single.is_local)
        assert whole.tokens.depths == [len(whole.tokens.path(node)) for node in range(len(whole))]


def test_a_window_is_for_one_step_and_what_a_draft_proposed_of_it_stays_as_any_node() -> None:
    tree = tree_of(proposal([5, 6]))
    tree.hang("lookahead", [5, 7], [-1, -1], [0.5, 0.5], 0)
    assert tree.has_window
    assert [node.is_window for node in tree.nodes] == [True, False, True]
    tree.drop_local()
    assert not tree.has_window
    assert tree.tokens.token_ids == [5, 6]
    assert not any(node.is_window for node in tree.nodes)


def test_who_else_offered_a_drafts_node_is_forgotten_with_the_step_also_where_every_node_is_the_drafts() -> None:
    tree = tree_of(proposal([5, 6]))
    tree.hang("ngram", [5], [-1], [0.5])
    assert [node.others for node in tree.nodes] == [(("ngram", 0.5),), ()]
    assert tree.drop_local() == 0
    assert [node.others for node in tree.nodes] == [(), ()]
    assert tree.tokens.token_ids == [5, 6]
