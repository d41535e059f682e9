"""What a tree of guesses leaves of the KV cache, over a model whose keys and values are digests."""

import pytest
import torch

from specdec.engine.errors import SequenceStateError, TreeError
from specdec.engine.tree import TokenTree
from tests.support.engine.engine_steps import PROMPT, assert_next_logits_are_fresh, prefilled, step
from tests.support.engine.exact_runner import fresh_logits, make_engine


def test_rejecting_first_token_rolls_back_whole_draft() -> None:
    engine, runner = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1, 2, 3, 4, 5, 6])
    output = step(engine)
    assert output.items[0].tree_nodes == 6
    assert len(output.logits) == 7
    blocks_before = len(seq.block_ids)
    engine.accept(seq, [])
    assert len(seq.token_ids) == seq.num_computed_tokens == len(PROMPT) + 1
    assert len(seq.block_ids) < blocks_before
    assert runner.num_slot_copies == 0
    assert_next_logits_are_fresh(engine, seq)


def test_accepting_part_of_a_chain_moves_nothing() -> None:
    engine, runner = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1, 2, 3, 4])
    step(engine)
    engine.accept(seq, [0, 1])
    assert seq.token_ids == [*PROMPT, 7, 1, 2]
    assert seq.num_pending_tokens == 0
    assert runner.num_slot_copies == 0
    assert_next_logits_are_fresh(engine, seq)


def test_accepting_a_branch_compacts_it_into_place() -> None:
    engine, runner = make_engine()
    seq = prefilled(engine)
    tree = TokenTree([1, 2, 3, 4, 5, 6], [-1, -1, 0, 1, 3, 4])
    seq.tree = tree
    output = step(engine)
    for node in range(6):
        path = [tree.token_ids[i] for i in tree.path(node)]
        assert torch.equal(output.logits[node + 1], fresh_logits([*PROMPT, 7, *path]))
    engine.accept(seq, [1, 3, 4, 5])
    assert seq.token_ids == [*PROMPT, 7, 2, 4, 5, 6]
    assert seq.num_pending_tokens == 0
    assert runner.num_slot_copies == 4
    assert_next_logits_are_fresh(engine, seq)


def test_a_node_can_be_accepted_once_and_only_if_it_was_verified() -> None:
    engine, _ = make_engine(max_batch_tokens=10)
    seq = prefilled(engine)
    seq.tree = TokenTree(range(20))
    assert step(engine).items[0].tree_nodes == 9
    with pytest.raises(TreeError):
        engine.accept(seq, list(range(10)))
    with pytest.raises(TreeError):
        engine.accept(seq, [1])
    engine.accept(seq, [0])
    with pytest.raises(SequenceStateError):
        engine.accept(seq, [0])


def test_nodes_that_are_not_accepted_before_the_next_step_are_forgotten() -> None:
    engine, _ = make_engine()
    seq, other = prefilled(engine), prefilled(engine, [1, 2, 3])
    seq.tree = TokenTree([1, 2, 3])
    step(engine)
    engine.append(other, [4])
    step(engine)
    with pytest.raises(SequenceStateError):
        engine.accept(seq, [0])
    assert_next_logits_are_fresh(engine, seq)


def test_a_tree_can_hang_from_a_token_that_is_computed_already() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    step(engine)
    seq.tree = TokenTree([1, 2], [-1, -1])
    output = step(engine)
    assert (output.items[0].num_new_tokens, output.items[0].tree_nodes) == (0, 2)
    assert torch.equal(output.logits[1], fresh_logits([*PROMPT, 7, 2]))
    engine.accept(seq, [1])
    assert_next_logits_are_fresh(engine, seq)


def test_appending_drops_a_tree_that_hung_from_another_token() -> None:
    engine, _ = make_engine()
    seq = prefilled(engine)
    seq.tree = TokenTree([1])
    engine.append(seq, [2])
    assert seq.tree is None
