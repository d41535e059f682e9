from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.sampling import rejection
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.engine.sampling.rejection import DraftSample, InvalidDraftDistribution, verify_token
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.engine.sampling.sparse import draw_sparse, read_sparse
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.sparse_draw import draw

ALMOST_ONE = 1.0 - 2.0**-53
ALMOST_ZERO = 2.0**-53


def params(seed: int = 1, **changed: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=9, **changed)


@pytest.fixture
def fix_uniforms(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the accept test and the residual draw use given numbers."""

    def fix(accept: float, residual: float) -> None:
        numbers = {Purpose.ACCEPT: accept, Purpose.RESIDUAL: residual}
        monkeypatch.setattr(rejection, "uniform", lambda seed, choice, purpose, t: numbers[purpose])

    return fix


def test_greedy_verification_is_equality() -> None:
    one_hot = torch.tensor([0.0, 0.0, 1.0, 0.0])
    draft = (0, 2), (0.5, 0.5)
    assert verify_token(one_hot, DraftSample(2, *draft), params(temperature=0.0), 5) == (True, 2)
    assert verify_token(one_hot, DraftSample(0, *draft), params(temperature=0.0), 5) == (False, 2)


def test_a_token_is_accepted_up_to_the_ratio_of_target_and_draft(fix_uniforms: Callable[..., None]) -> None:
    target = torch.tensor([0.2, 0.3, 0.5])
    draft = DraftSample(0, (0, 1), (0.8, 0.2))
    fix_uniforms(accept=0.2499, residual=0.5)
    assert verify_token(target, draft, params(), 5) == (True, 0)
    fix_uniforms(accept=0.2501, residual=0.5)
    assert verify_token(target, draft, params(), 5)[0] is False


def test_the_residual_is_what_the_target_has_more_of(fix_uniforms: Callable[..., None]) -> None:
    # p - q = (-0.6, 0.1, 0.5): one sixth and five sixths
    target = torch.tensor([0.2, 0.3, 0.5])
    draft = DraftSample(0, (0, 1), (0.8, 0.2))
    for residual, expected in ((ALMOST_ZERO, 1), (0.166, 1), (0.168, 2), (ALMOST_ONE, 2)):
        fix_uniforms(accept=0.9, residual=residual)
        assert verify_token(target, draft, params(), 5) == (False, expected)


def test_both_distributions_are_divided_by_their_sums(fix_uniforms: Callable[..., None]) -> None:
    target, draft = torch.tensor([2.0, 3.0, 5.0]), DraftSample(0, (0, 1), (0.08, 0.02))
    fix_uniforms(accept=0.2499, residual=0.5)
    assert verify_token(target, draft, params(), 5) == (True, 0)
    fix_uniforms(accept=0.2501, residual=0.168)
    assert verify_token(target, draft, params(), 5) == (False, 2)


def test_zero_residual_mass_means_accept(fix_uniforms: Callable[..., None]) -> None:
    target = torch.tensor([0.3, 0.3, 0.4])
    values = target.tolist()
    # Halves of the last bit: the ratio is just under 1 for the token, and nothing is left over for any other.
    draft = DraftSample(0, (0, 1, 2), tuple(values))
    fix_uniforms(accept=2.0, residual=0.5)
    assert verify_token(target, draft, params(), 5) == (True, 0)


@pytest.mark.parametrize("residual", [ALMOST_ZERO, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("accept", [ALMOST_ZERO, ALMOST_ONE])
def test_a_token_of_zero_target_probability_is_never_emitted(
    accept: float, residual: float, fix_uniforms: Callable[..., None]
) -> None:
    target = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    for token_id in (0, 2, 4):
        fix_uniforms(accept, residual)
        accepted, emitted = verify_token(target, DraftSample(token_id, (0, 2, 4), (0.5, 0.3, 0.2)), params(), 5)
        assert not accepted
        assert emitted in (1, 3)


@pytest.mark.parametrize(("u", "expected"), [(ALMOST_ZERO, 3), (0.6999, 3), (0.7001, 2), (ALMOST_ONE, 4)])
def test_drawing_walks_the_cumulated_probabilities_from_the_likeliest_on(u: float, expected: int) -> None:
    probs = torch.tensor([[0.0, 0.0, 0.2, 0.7, 0.1]])
    [sample] = read_sparse(draw_sparse(probs, torch.tensor([[u]], dtype=torch.float64), 4))
    assert sample is not None
    assert sample.token_id == expected


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (DraftSample(1, (1, 2), (1.0,)), "2 ids but 1"),
        (DraftSample(1, (1, 1), (0.5, 0.5)), "twice"),
        (DraftSample(1, (1, 10), (0.5, 0.5)), "outside the vocabulary"),
        (DraftSample(1, (1, -1), (0.5, 0.5)), "outside the vocabulary"),
        (DraftSample(1, (1, 2), (1.0, 0.0)), "not positive"),
        (DraftSample(1, (1, 2), (1.0, float("nan"))), "not positive"),
        (DraftSample(1, (1, 2), (1.0, float("inf"))), "not positive"),
        (DraftSample(3, (1, 2), (0.5, 0.5)), "outside its own"),
        (DraftSample(3, (), ()), "outside its own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pairs_that_are_no_distribution_are_refused(draft: DraftSample, reason: str) -> None:
    with pytest.raises(InvalidDraftDistribution, match=reason):
        draft.check(vocab_size=10)


def draft_of(logits: torch.Tensor, m: int, **changed: Any) -> DraftSample:
    (sample,) = Sampler(logits.shape[1], "cpu").draft_sample(logits, [RowContext(params(**changed), 5, 2)], m)
    sample.check(logits.shape[1])
    return sample


def test_a_draft_keeps_its_likeliest_tokens_and_renormalises_them() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(3))
    draft = draft_of(logits, 64)
    assert list(draft.ids) == logits[0].topk(64).indices.tolist()
    assert sum(draft.probs) == pytest.approx(1.0, abs=1e-6)
    assert list(draft.probs) == pytest.approx(logits[0, list(draft.ids)].softmax(0).tolist(), rel=1e-5)


def test_a_draft_draws_from_what_it_sends_not_from_what_it_rounded() -> None:
    draft = draft_of(torch.randn(1, 500, generator=torch.Generator().manual_seed(3)), 64)
    assert [float(np.float32(prob)) for prob in draft.probs] == list(draft.probs)
    assert draft.token_id == draw(draft.ids, draft.probs, uniform(1, 0, Purpose.DRAFT, 5))


def test_a_draft_whose_support_fits_is_the_target_distribution_to_the_bit() -> None:
    logits = torch.randn(200, 100, generator=torch.Generator().manual_seed(3))
    rows = [RowContext(params(top_p=0.7), t, 2) for t in range(200)]
    sampler = Sampler(100, "cpu")
    for probs, draft in zip(sampler.probs(logits, rows), sampler.draft_sample(logits, rows), strict=True):
        expected = {int(token_id): float(probs[token_id]) for token_id in probs.nonzero().squeeze(1)}
        assert dict(zip(draft.ids, draft.probs, strict=True)) == expected


def test_a_greedy_draft_is_certain() -> None:
    draft = draft_of(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), 64, temperature=0.0)
    assert draft == DraftSample(1, (1,), (1.0,))
