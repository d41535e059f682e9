"""Trees of the likeliest paths, and what is drawn for them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafting.heads.drawing import after, choose, without_noise
from specdec.drafting.heads.growth import GrowingTree
from specdec.drafting.heads.vocabulary import DraftVocabulary
from specdec.drafting.interface import Room
from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.engine.tree import check_tree
from specdec.wire.sampling_params import SamplingParams

SHARES = ((0.6, 0.3, 0.1), (0.5, 0.5, 0.0), (0.9, 0.06, 0.04))


def grown(num_nodes: int, depth: int, top_k: int) -> tuple[list[int], list[int], list[float]] | None:
    """Tokens say by their last digit which choice they are; choices of a depth are the same everywhere."""
    tree = GrowingTree(Room(num_nodes, depth), top_k)
    for level, shares in enumerate(SHARES):
        if not tree.grows:
            break
        tree.add_level([[(10 * level + i, share) for i, share in enumerate(shares)] for _ in tree.beam])
    offer = tree.offer()
    return None if offer is None else (offer.token_ids, offer.parents, offer.scores)


@given(num_nodes=st.integers(0, 40), depth=st.integers(0, 5), top_k=st.integers(1, 4))
def test_what_is_offered_is_a_tree_of_the_best_nodes_that_grew(num_nodes: int, depth: int, top_k: int) -> None:
    offer = grown(num_nodes, depth, top_k)
    if num_nodes == 0 or depth == 0:
        assert offer is None
        return
    assert offer is not None
    token_ids, parents, scores = offer
    check_tree(token_ids, parents, 100, 64)
    assert len(token_ids) <= num_nodes
    values: list[float] = []
    for parent, score in zip(parents, scores, strict=True):
        values.append(score * (values[parent] if parent >= 0 else 1.0))
    if top_k >= 3 and num_nodes < 3:  # nothing that is worth more was cut off
        first = list(SHARES[0])
        every = sorted(itertools.chain(first, (a * b for a in first for b in SHARES[1] if depth > 1)), reverse=True)
        assert sorted(values, reverse=True) == pytest.approx(every[: len(values)])


def test_with_one_choice_it_is_a_chain() -> None:
    assert grown(8, 3, 1) == ([0, 10, 20], [-1, 0, 1], [0.6, 0.5, 0.9])


def row(**params: float) -> RowContext:
    return RowContext(SamplingParams(max_tokens=9, seed=5, **params), 7, 3)  # type: ignore[arg-type]


def test_what_is_drawn_is_what_the_target_draws_from_the_same_logits() -> None:
    sampler = Sampler(50, "cpu")
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows = [after(row(temperature=temperature), (1,) * depth) for depth, temperature in enumerate((0.0, 0.7, 1.0, 1.0))]
    drawn = choose(sampler, logits, rows, 3)
    assert [choices[0][0] for choices in drawn] == sampler.sample(logits, rows)
    assert all(len(choices) == 3 and choices[0][1] >= choices[1][1] >= choices[2][1] > 0 for choices in drawn)


def test_without_noise_it_is_the_likeliest_whatever_the_seed() -> None:
    sampler = Sampler(50, "cpu")
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    drawn = choose(sampler, logits, [without_noise(row(temperature=1.0))], 2)
    assert [token for token, _ in drawn[0]] == logits[0].topk(2).indices.tolist()


def test_tokens_that_a_head_cannot_name_are_never_drawn_and_nan_is_an_error() -> None:
    sampler = Sampler(6, "cpu")
    spread = DraftVocabulary(torch.tensor([4, 1]), 2, 6).spread(torch.tensor([[2.0, 3.0]]))
    assert spread.tolist() == [[-torch.inf, 3.0, -torch.inf, -torch.inf, 2.0, -torch.inf]]
    assert [token for token, _ in choose(sampler, spread, [row(temperature=0.0)], 4)[0]] == [1, 4]
    with pytest.raises(NonFiniteLogits):
        choose(sampler, torch.tensor([[1.0, torch.nan, 0, 0, 0, 0]]), [row(temperature=0.0)], 1)
    assert DraftVocabulary(None, 3, 6).spread(torch.ones(1, 3)).tolist() == [[1, 1, 1, *[-torch.inf] * 3]]
