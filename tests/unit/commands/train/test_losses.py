"""Acceptance and losses against all pairs, draws and finite differences."""

from __future__ import annotations

import pytest
import torch

from specdec.commands.train.losses import (
    LOSSES,
    confidence_loss,
    coupled_acceptance,
    coupled_given,
    loss_of,
    ratio_acceptance,
    ratio_given,
)

NUM_DRAWS = 200_000
SIGMAS = 5
"""Of a binomial share: a false alarm in 1.7 million for each of the shares compared."""


def distributions(rows: int, size: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)).softmax(-1)


def all_pairs(p: torch.Tensor, q: torch.Tensor) -> float:
    """The closed form as it is written."""
    return sum(
        1 / sum(max(float(p[j] / p[i]), float(q[j] / q[i])) for j in range(len(p))) for i in range(len(p)) if q[i] > 0
    )


def check(events: torch.Tensor, expected: torch.Tensor) -> None:
    share = float(expected)
    assert float(events.mean()) == pytest.approx(share, abs=SIGMAS * (share * (1 - share) / len(events)) ** 0.5)


def test_coupled_acceptance_is_the_sum_over_all_pairs() -> None:
    p, q = distributions(20, 17, 1), distributions(20, 17, 2)
    found = coupled_acceptance(p, q)
    assert found.tolist() == pytest.approx([all_pairs(*row) for row in zip(p, q, strict=True)], rel=1e-12)


def test_equal_distributions_are_always_accepted_and_disjoint_ones_never() -> None:
    p = distributions(5, 9, 3)
    assert coupled_acceptance(p, p).tolist() == pytest.approx([1.0] * 5)
    one, other = torch.eye(4, dtype=torch.float64)[:1], torch.eye(4, dtype=torch.float64)[1:2]
    assert coupled_acceptance(one, other).item() == pytest.approx(0.0, abs=1e-12)


def test_tokens_that_the_draft_cannot_name_count_as_ones_that_it_never_draws() -> None:
    p, q = distributions(20, 12, 4), distributions(20, 8, 5)
    padded = torch.cat([q, torch.zeros(20, 4, dtype=torch.float64)], dim=-1)
    few = coupled_acceptance(p[:, :8], q)
    assert few.tolist() == pytest.approx([all_pairs(*row) for row in zip(p, padded, strict=True)], rel=1e-9)
    columns = torch.arange(20) % 8
    assert torch.allclose(coupled_given(p[:, :8], q, columns), coupled_given(p, padded, columns))


def test_shared_noise_and_the_ratio_test_accept_as_often_as_is_computed() -> None:
    p, q = distributions(1, 12, 6)[0], distributions(1, 12, 7)[0]
    generator = torch.Generator().manual_seed(8)
    exponential = torch.empty(NUM_DRAWS, 12, dtype=torch.float64).exponential_(generator=generator)
    mine, theirs = (p / exponential).argmax(-1), (q / exponential).argmax(-1)
    same = (mine == theirs).double()
    check(same, coupled_acceptance(p[None], q[None]))
    check(same[mine == 3], coupled_given(p[None], q[None], torch.tensor([3])))
    drawn = torch.multinomial(q, NUM_DRAWS, replacement=True, generator=generator)
    is_taken = torch.rand(NUM_DRAWS, generator=generator) < (p / q)[drawn]
    check(is_taken.double(), ratio_acceptance(p[None], q[None]))


def test_acceptance_given_each_token_of_the_target_adds_up_to_acceptance() -> None:
    p, q = distributions(6, 10, 9), distributions(6, 10, 10)
    for given, whole in ((coupled_given, coupled_acceptance), (ratio_given, ratio_acceptance)):
        shares = torch.stack([given(p, q, torch.full((6,), token)) for token in range(10)], dim=-1)
        assert torch.allclose((p * shares).sum(-1), whole(p, q), atol=1e-12)


def test_sharing_noise_costs_some_acceptance_and_never_more_than_is_proved() -> None:
    """Daliri, Musco, Suresh: with total variation d at least (1 - d) / (1 + d)."""
    p, q = distributions(200, 30, 11), distributions(200, 30, 12)
    coupled, ratio = coupled_acceptance(p, q), ratio_acceptance(p, q)
    assert bool((coupled <= ratio + 1e-12).all())
    assert bool((coupled >= ratio / (2 - ratio) - 1e-12).all())


def test_gradient_of_the_coupled_acceptance_is_that_of_finite_differences() -> None:
    p = distributions(4, 11, 13)
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(14), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: coupled_acceptance(p, x.softmax(-1)), (logits,), eps=1e-7, atol=1e-6)


def test_the_loss_of_confidence_is_least_where_it_is_the_acceptance_and_moves_no_logits() -> None:
    p = distributions(8, 13, 18).float()
    logits = torch.randn(8, 13, generator=torch.Generator().manual_seed(19), requires_grad=True)
    share = coupled_acceptance(p, logits.detach().softmax(-1)).requires_grad_()
    least = confidence_loss(share, p, logits)
    least.sum().backward()
    assert logits.grad is None
    assert share.grad is not None and float(share.grad.abs().max()) < 1e-4
    for by in (-0.05, 0.05):
        assert bool((confidence_loss(share.detach() + by, p, logits) > least).all())
    assert bool(torch.isfinite(confidence_loss(torch.tensor([0.0, 1.0] * 4), p, logits)).all())


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_least_where_the_draft_is_the_target_and_falls_on_the_way_there(name: str) -> None:
    p = distributions(8, 13, 15).float()
    begin = torch.randn(8, 13, generator=torch.Generator().manual_seed(16))
    ways = [loss_of(name, p, begin + share * (p.log() - begin)).mean().item() for share in (0.0, 0.5, 0.9, 1.0)]  # type: ignore[arg-type]
    assert ways == sorted(ways, reverse=True)
    assert ways[-1] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_descent_on_every_loss_raises_acceptance(name: str) -> None:
    p = distributions(16, 40, 17).float()
    logits = torch.zeros(16, 40, requires_grad=True)
    before = coupled_acceptance(p, logits.softmax(-1)).mean().item()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(name, p, logits).mean().backward()  # type: ignore[arg-type]
        optimizer.step()
    assert coupled_acceptance(p, logits.softmax(-1)).mean().item() > before + 0.2


def test_a_row_of_certain_tokens_has_a_finite_loss_and_gradient() -> None:
    p = torch.eye(5)[:3]
    for name in LOSSES:
        logits = torch.tensor([[100.0, 0, 0, 0, -100]] * 3, requires_grad=True)
        loss_of(name, p, logits).sum().backward()
        assert logits.grad is not None and bool(torch.isfinite(logits.grad).all()), name
