"""Every row gives a token that float64 would give, or is reported as one that gives none; and no row harms another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.rejection import DraftSample, verify_token
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.extreme_rows import MAX_VOCAB_SIZE, Batch, all_results, batches, exact_scores
from tests.support.for_each import for_each

PATHS = ("torch", "native")
SAMPLERS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make_sampler(vocab_size: int, path: str) -> Sampler:
    return Sampler(vocab_size, "cpu", native="on" if path == "native" else "off")


@pytest.mark.parametrize("path", PATHS)
@SAMPLERS
@given(batch=batches())
def test_a_row_gives_the_best_token_that_is_left_or_none(path: str, batch: Batch) -> None:
    sampler = make_sampler(batch.vocab_size, path)
    tokens = sampler.sample(batch.logits, batch.rows)
    candidates = sampler.candidates(batch.logits, batch.rows, 4)
    scores = sampler.process(batch.logits, batch.rows)
    for r, row in enumerate(batch.rows):
        exact = exact_scores(batch.logits[r, : batch.vocab_size], row)
        if exact is None:
            assert tokens[r] is None
            assert candidates[r] == []
            continue
        token = tokens[r]
        assert token is not None
        assert 0 <= token < batch.vocab_size
        kept = scores[r] > -math.inf
        assert not scores[r].isnan().any()
        assert math.isfinite(scores[r, token])
        expected, slack = exact
        assert float(expected[token] + slack[token]) >= float(expected[kept].max() - slack[expected.argmax()])
        assert candidates[r][0].token_id == token
        assert all(math.isfinite(candidate.score) for candidate in candidates[r])
        assert all(kept[candidate.token_id] for candidate in candidates[r])


@SAMPLERS
@given(batch=batches())
def test_rows_that_are_sampled_one_after_the_other_give_what_they_give_together(batch: Batch) -> None:
    together = make_sampler(batch.vocab_size, "torch")
    in_turns = Sampler(batch.vocab_size, "cpu", native="off", rows_at_once=1)
    assert in_turns.sample(batch.logits, batch.rows) == together.sample(batch.logits, batch.rows)
    assert in_turns.candidates(batch.logits, batch.rows, 4) == together.candidates(batch.logits, batch.rows, 4)


@pytest.mark.parametrize("path", PATHS)
@SAMPLERS
@given(batch=batches())
def test_a_row_gives_a_distribution_to_draft_and_to_verify_from_or_none(path: str, batch: Batch) -> None:
    sampler = make_sampler(batch.vocab_size, path)
    tokens = sampler.sample(batch.logits, batch.rows)
    probs = sampler.probs(batch.logits, batch.rows)
    drafted = sampler.draft_sample(batch.logits, batch.rows, 3)
    for row, token, own, sample in zip(batch.rows, tokens, probs, drafted, strict=True):
        if token is None:
            assert own.isnan().all()
            assert sample is None
            with pytest.raises(NonFiniteLogits):
                verify_token(own, DraftSample(0, (0,), (1.0,)), row.params, row.position)
            continue
        assert abs(float(own.sum()) - 1.0) < 1e-4
        assert sample is not None
        sample.check(batch.vocab_size)
        # The other end of float32, too: whatever an honest or a lying draft may send.
        for offered in (sample, DraftSample(token, (token,), (1e-45,)), DraftSample(0, (0,), (3e38,))):
            verified = verify_token(own, offered, row.params, row.position)[1]
            assert float(own[verified]) > 0.0


@pytest.mark.parametrize("path", PATHS)
@SAMPLERS
@given(batch=batches())
def test_log_probabilities_are_numbers_for_every_row_that_gives_a_token(path: str, batch: Batch) -> None:
    sampler = make_sampler(batch.vocab_size, path)
    tokens = sampler.sample(batch.logits, batch.rows)
    for r, (row, token) in enumerate(zip(batch.rows, tokens, strict=True)):
        own = batch.logits[r : r + 1]
        if token is None:
            continue
        (told,) = sampler.logprobs(own, [row], [token])
        if told is not None:
            assert -math.inf < told.logprob < 1e-9
            assert all(logprob < 1e-9 for _, logprob in told.top)


@pytest.mark.parametrize("path", PATHS)
@SAMPLERS
@given(batch=batches())
def test_no_row_changes_a_bit_of_another(path: str, batch: Batch) -> None:
    sampler = make_sampler(batch.vocab_size, path)
    together = all_results(sampler, batch.logits, batch.rows)
    for r, row in enumerate(batch.rows):
        assert all_results(sampler, batch.logits[r : r + 1], [row]) == [together[r]]


@SAMPLERS
@given(batch=batches())
def test_native_and_torch_paths_agree_to_the_bit_at_the_extremes(batch: Batch) -> None:
    native, plain = (make_sampler(batch.vocab_size, path) for path in ("native", "torch"))
    assert all_results(native, batch.logits, batch.rows) == all_results(plain, batch.logits, batch.rows)


def a_row(**changed: Any) -> RowContext:
    return RowContext(SamplingParams(**{"seed": 3, "max_tokens": 9, **changed}), 5, 2)


@for_each("path", PATHS)
@for_each("place", [0, 1, 511, 512, 1023, 1499])
@for_each("poison", [math.nan, -math.nan, math.inf])
@for_each("changed", [{}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_one_bad_logit_anywhere_is_found(path: str, place: int, poison: float, changed: dict[str, Any]) -> None:
    sampler, logits = make_sampler(1500, path), torch.randn(3, 1500, generator=torch.Generator().manual_seed(1))
    expected = sampler.sample(logits, [a_row(**changed)] * 3)
    logits[1, place] = poison
    rows = [a_row(**changed)] * 3
    assert sampler.sample(logits, rows) == [expected[0], None, expected[2]]
    assert [bool(found) for found in sampler.candidates(logits, rows, 3)] == [True, False, True]
    assert [sample is None for sample in sampler.draft_sample(logits, rows)] == [False, True, False]
    assert sampler.probs(logits, rows).isnan().all(dim=1).tolist() == [False, True, False]
    with pytest.raises(NonFiniteLogits):
        sampler.logprobs(logits, [a_row(num_logprobs=0)] * 3, [0, 0, 0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_logit_of_a_token_that_is_held_back_or_biased_is_found(path: str, poison: float) -> None:
    sampler, logits = make_sampler(40, path), torch.zeros(1, 40)
    logits[0, 7] = poison
    for changed in ({"min_tokens": 9, "eos_token_ids": (7,)}, {"logit_bias": {7: -100.0}}):
        assert sampler.sample(logits, [a_row(**changed)]) == [None]


@pytest.mark.parametrize("path", PATHS)
def test_a_mask_over_all_tokens_but_one_leaves_that_one_and_a_mask_over_all_none(path: str) -> None:
    sampler = make_sampler(MAX_VOCAB_SIZE, path)
    logits = torch.full((2, MAX_VOCAB_SIZE), -math.inf)
    logits[0, 31] = -3e38
    for changed in ({}, {"temperature": 0.0}, {"top_p": 0.1, "top_k": 3}, {"temperature": 100.0}):
        assert sampler.sample(logits, [a_row(**changed)] * 2) == [31, None]
