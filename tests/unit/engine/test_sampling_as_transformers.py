"""What the sampler makes of logits is what the processors of transformers make of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as reference

from specdec.engine.sampling.sampler import Sampler
from tests.support.engine.sampling_rows import OUTPUT, PROMPT, VOCAB_SIZE, kept, make_logits, make_row, make_sampler
from tests.support.for_each import for_each

INPUT_IDS: Any = torch.tensor([PROMPT + OUTPUT])


def test_repetition_penalty_is_that_of_transformers(sampler: Sampler) -> None:
    logits = make_logits(1)
    expected = reference.RepetitionPenaltyLogitsProcessor(1.3)(INPUT_IDS, logits.clone())
    row = make_row(temperature=0.0, repetition_penalty=1.3)
    assert torch.equal(sampler.process(logits, [row]), expected)


def test_bias_comes_before_the_repetition_penalty_as_in_transformers(sampler: Sampler) -> None:
    logits = make_logits(1)
    expected = reference.SequenceBiasLogitsProcessor([[[9], -8.0], [[7], 4.0]])(INPUT_IDS, logits.clone())
    expected = reference.RepetitionPenaltyLogitsProcessor(1.3)(INPUT_IDS, expected)
    row = make_row(temperature=0.0, repetition_penalty=1.3, logit_bias={9: -8.0, 7: 4.0})
    assert torch.equal(sampler.process(logits, [row]), expected)


def test_presence_and_frequency_penalties_count_output_tokens_only(sampler: Sampler) -> None:
    logits = make_logits(1)
    expected = logits.clone()
    for token_id, count in Counter(OUTPUT).items():
        expected[0, token_id] = expected[0, token_id] - 0.5 - 0.25 * count
    row = make_row(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    torch.testing.assert_close(sampler.process(logits, [row]), expected)


@pytest.mark.parametrize("num_output_tokens", [4, 5])
def test_min_tokens_is_that_of_transformers(sampler: Sampler, num_output_tokens: int) -> None:
    logits = make_logits(1)
    processor = reference.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [2, 8])
    expected = processor(INPUT_IDS[:, : len(PROMPT) + num_output_tokens], logits.clone())
    row = make_row(
        position=len(PROMPT) + num_output_tokens, temperature=0.0, min_tokens=5, eos_token_ids=(2,), stop_token_ids=(8,)
    )
    assert torch.equal(sampler.process(logits, [row]), expected)


BAD_WORDS = [[[4]], [[4], [5, 6]], [[*OUTPUT[-1:], 3]], [[*OUTPUT[-2:], 3], [*OUTPUT[-3:-1], 3]], [[*OUTPUT, 3]]]


@pytest.mark.parametrize("words", BAD_WORDS, ids=str)
def test_bad_words_are_those_of_transformers(sampler: Sampler, words: list[list[int]]) -> None:
    logits = make_logits(1)
    expected = reference.NoBadWordsLogitsProcessor(words)(torch.tensor([OUTPUT]), logits.clone())
    row = make_row(temperature=0.0, bad_words=tuple(map(tuple, words)))
    assert torch.equal(sampler.process(logits, [row]), expected)
    assert bool((expected == -torch.inf).any())


def test_a_bad_word_may_begin_in_committed_tokens_and_end_in_drafted_ones(sampler: Sampler) -> None:
    logits = make_logits(1)
    row = make_row(extra_tokens=(9, 60), temperature=0.0, bad_words=((OUTPUT[-1], 9, 60, 3), (9, 9, 60, 4)))
    scores = sampler.process(logits, [row])
    assert scores[0, 3] == -torch.inf
    assert scores[0, 4] == logits[0, 4]


def test_the_prompt_is_no_part_of_a_bad_word(sampler: Sampler) -> None:
    logits = make_logits(1)
    row = make_row(temperature=0.0, bad_words=((PROMPT[-1], *OUTPUT, 3),))
    assert sampler.process(logits, [row])[0, 3] == logits[0, 3]


def test_only_allowed_tokens_are_sampled(sampler: Sampler) -> None:
    logits = make_logits(1)
    scores = sampler.process(logits, [make_row(temperature=0.0, allowed_token_ids=(9, 3, 9, 10**6))])
    assert torch.isfinite(scores[0]).nonzero().flatten().tolist() == [3, 9]
    assert torch.equal(scores[0, [3, 9]], logits[0, [3, 9]])
    tokens = {sampler.sample(logits, [make_row(seed=seed, allowed_token_ids=(3, 9))])[0] for seed in range(30)}
    assert tokens == {3, 9}
    (drawn,) = sampler.draft_sample(logits, [make_row(allowed_token_ids=(3, 9))])
    assert drawn is not None
    assert {token_id for token_id, mass in zip(drawn.ids, drawn.probs, strict=True) if mass > 0} == {3, 9}


def test_where_bad_words_leave_nothing_they_are_let_through(sampler: Sampler) -> None:
    row = make_row(allowed_token_ids=(3, 9), bad_words=((3,), (9,)))
    assert sampler.sample(make_logits(1), [row])[0] in (3, 9)
    row = make_row(allowed_token_ids=(3, 9), bad_words=((3,), (9,), (5,)), min_tokens=99, stop_token_ids=(9,))
    assert sampler.sample(make_logits(1), [row]) == [3]


CUTS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.01},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.2},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
]


@for_each("temperature", [0.5, 1.0, 2.0])
@for_each("cuts", CUTS)
def test_kept_tokens_are_those_of_transformers(sampler: Sampler, cuts: dict[str, Any], temperature: float) -> None:
    logits = make_logits(64)
    expected = reference.TemperatureLogitsWarper(temperature)(INPUT_IDS, logits.clone())
    if "top_k" in cuts:
        expected = reference.TopKLogitsWarper(int(cuts["top_k"]))(INPUT_IDS, expected)
    if "top_p" in cuts:
        expected = reference.TopPLogitsWarper(cuts["top_p"])(INPUT_IDS, expected)
    if "min_p" in cuts:
        expected = reference.MinPLogitsWarper(cuts["min_p"])(INPUT_IDS, expected)
    rows = [make_row(temperature=temperature, **cuts)] * 64
    assert torch.equal(kept(sampler.process(logits, rows)), kept(expected))
    torch.testing.assert_close(sampler.probs(logits, rows), expected.softmax(1))


def test_top_k_keeps_all_that_tie_with_the_last(sampler: Sampler) -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0, 0.0]])
    scores = make_sampler(6, "native" if sampler.is_native else "torch").process(logits, [make_row(top_k=3)])
    assert kept(scores).tolist() == [[True, True, True, True, True, False]]


@for_each("far", [44.0, 44.5, 46.0, 63.9, 64.1, 500.0])
@for_each("num_far", [1, 40, 300])
def test_tokens_far_below_the_best_weigh_nothing_in_top_p(sampler: Sampler, far: float, num_far: int) -> None:
    wide = make_sampler(4 + num_far, "native" if sampler.is_native else "torch")
    logits = torch.tensor([[0.0] * 4 + [-far] * num_far])
    assert torch.isfinite(wide.process(logits, [make_row(top_p=0.5)])[0]).sum() == 2


def test_top_p_takes_the_lower_ids_of_a_tie(sampler: Sampler) -> None:
    scores = sampler.process(torch.zeros(1, VOCAB_SIZE), [make_row(top_p=0.1)])
    assert kept(scores)[0].nonzero().squeeze(1).tolist() == list(range(30))


@pytest.mark.parametrize("top_p", [0.0, 1e-12])
def test_top_p_of_nothing_keeps_the_best_token(sampler: Sampler, top_p: float) -> None:
    logits = make_logits(5)
    scores = sampler.process(logits, [make_row(top_p=top_p)] * 5)
    assert kept(scores).sum(1).tolist() == [1] * 5
    assert scores.argmax(1).tolist() == logits.argmax(1).tolist()
