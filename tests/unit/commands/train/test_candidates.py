"""A step that computes few of a vocabulary's logits learns what one that computes all would."""

from __future__ import annotations

import pytest
import torch

from specdec.commands.train.candidates import Candidates, draw_candidates
from specdec.commands.train.losses import LOSSES, loss_of

ROWS, SIZE, KEPT = 12, 50, 8


def drawn_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's probabilities and a draft's logits [ROWS, SIZE]."""
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)


def taught(probs: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the likeliest tokens, and their probabilities with the rest's."""
    best, columns = probs.topk(num)
    return columns, torch.cat([best, probs.sum(-1, keepdim=True) - best.sum(-1, keepdim=True)], dim=-1)


def of_columns(candidates: Candidates, logits: torch.Tensor) -> torch.Tensor:
    return logits if candidates.columns is None else logits[:, candidates.columns]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_the_full_ones_where_all_tokens_are_kept(name: str) -> None:
    probs, logits = drawn_rows(1)
    columns, wanted = taught(probs, SIZE)
    candidates = draw_candidates(columns, SIZE, 4, torch.Generator())
    grads = []
    for reduced in (False, True):
        leaf = logits.clone().requires_grad_()
        shown = candidates.kept_logits(of_columns(candidates, leaf), columns) if reduced else leaf
        loss = loss_of(name, wanted[:, :SIZE] if reduced else probs, shown)  # type: ignore[arg-type]
        loss.sum().backward()
        assert leaf.grad is not None
        grads.append((loss.detach(), leaf.grad))
    (full, full_grad), (few, few_grad) = grads
    assert torch.allclose(full, few, atol=1e-6)
    assert torch.allclose(full_grad, few_grad, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_with_few_kept_they_are_those_of_a_target_that_spreads_the_rest_as_the_draft_does(name: str) -> None:
    """The gradient too: the spread is a constant where the loss is computed."""
    probs, logits = drawn_rows(2)
    columns, wanted = taught(probs, KEPT)
    candidates = draw_candidates(columns, SIZE, SIZE, torch.Generator())
    few = logits.clone().requires_grad_()
    loss = loss_of(name, wanted, candidates.kept_logits(of_columns(candidates, few), columns))  # type: ignore[arg-type]
    others = logits.softmax(-1).scatter(-1, columns, 0.0)
    spread = others / others.sum(-1, keepdim=True) * wanted[:, -1:]
    spread = spread.scatter(-1, columns, wanted[:, :-1])
    full = logits.clone().requires_grad_()
    expected = loss_of(name, spread, full)  # type: ignore[arg-type]
    assert torch.allclose(loss, expected, atol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    assert few.grad is not None and full.grad is not None
    if name in ("kl", "tv"):
        assert torch.allclose(few.grad, full.grad, atol=1e-6)


def test_kept_logits_have_the_gradient_of_finite_differences() -> None:
    _, logits = drawn_rows(3)
    columns = torch.stack([torch.randperm(SIZE, generator=torch.Generator().manual_seed(row))[:3] for row in range(4)])
    candidates = draw_candidates(columns, SIZE, 5, torch.Generator().manual_seed(1))
    shown = of_columns(candidates, logits[:4]).clone().requires_grad_()
    assert shown.shape[1] < SIZE
    assert torch.autograd.gradcheck(lambda x: candidates.kept_logits(x, columns), (shown,))


def test_the_sum_of_the_others_is_right_on_average_and_exact_if_all_are_drawn() -> None:
    _, logits = drawn_rows(4)
    columns = torch.arange(3).expand(ROWS, 3)
    expected = logits[:, 3:].exp().sum(-1)
    all_drawn = draw_candidates(columns, SIZE, SIZE - 3, torch.Generator())
    assert all_drawn.columns is None
    assert torch.allclose(all_drawn.kept_logits(logits, columns)[:, -1].exp(), expected)
    sums = []
    for seed in range(2000):
        candidates = draw_candidates(columns, SIZE, 6, torch.Generator().manual_seed(seed))
        assert candidates.columns is not None
        assert len(candidates.columns) == 9
        sums.append(candidates.kept_logits(logits[:, candidates.columns], columns)[:, -1].exp())
    assert torch.allclose(torch.stack(sums).mean(0), expected, rtol=0.05)


def test_a_row_finds_its_own_tokens_among_those_that_other_rows_name() -> None:
    _, logits = drawn_rows(5)
    columns = torch.randint(SIZE - 10, (ROWS, 2), generator=torch.Generator().manual_seed(6))
    columns[:, 1] = columns[:, 0] + 10
    candidates = draw_candidates(columns, SIZE, 1, torch.Generator().manual_seed(7))
    kept = candidates.kept_logits(of_columns(candidates, logits), columns)
    assert torch.equal(kept[:, :-1], logits.gather(-1, columns))
    assert bool(torch.isfinite(kept).all())
