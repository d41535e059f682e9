"""Legal sampling parameters and logits at the ends of their ranges, and their scores in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE
from specdec.engine.sampling.noise import Purpose, gumbel, noise_key
from specdec.engine.sampling.sampler import RowContext, Sampler, TokenHistory
from specdec.wire.sampling_limits import LOGIT_BIAS, RANGES
from specdec.wire.sampling_params import SamplingParams

MAX_VOCAB_SIZE = 70
LARGEST = 3.4028234663852886e38
FINITE = (0.0, -0.0, 1.0, -1.5, 30.0, 65504.0, -65504.0, LARGEST, -LARGEST, 3.3895e38, 1e-45, -1e-45, 1.2e-38)
"""Finite float32 logits. 65504 is float16's largest number, 3.3895e38 bfloat16's, and 1e-45 float32's smallest."""
MASK = -math.inf
POISON = (math.nan, math.inf, -math.nan)
TINY = 5e-324
_NUMBERS = {
    "temperature": (0.0, -0.0, TINY, 1e-45, 1e-31, 1e-10, 0.7, 1.0),
    "top_p": (TINY, 0.5, 0.999999, 1.0),
    "min_p": (0.0, TINY, 0.3),
    "repetition_penalty": (1.0, 1.3),
    "presence_penalty": (0.0, -0.0, TINY),
    "frequency_penalty": (0.0, -TINY),
}


def legal_values(name: str) -> st.SearchStrategy[float]:
    """Values of a parameter, both ends of its range among them."""
    allowed = RANGES[name]
    values = (*_NUMBERS[name], *([] if allowed.open_low else [allowed.low]), allowed.high)
    assert all(allowed.fault_of(value) is None for value in values)
    return st.sampled_from(values)


@st.composite
def contexts(draw: Any, vocab_size: int) -> RowContext:
    """A row's context with legal parameters."""
    ids = st.integers(0, vocab_size - 1)
    prompt = draw(st.lists(ids, min_size=1, max_size=5))
    history = TokenHistory(prompt)
    history.append(draw(st.lists(ids, max_size=3)) + [draw(ids)] * draw(st.sampled_from([0, 0, 5000])))
    extra = tuple(draw(st.lists(ids, max_size=2)))
    biases = st.sampled_from((LOGIT_BIAS.low, LOGIT_BIAS.high, 1e-45, -0.0))
    params = SamplingParams(
        seed=draw(st.sampled_from((0, 7, 2**64 - 1))),
        choice=draw(st.sampled_from((0, 2**32 - 1))),
        max_tokens=2**32 - 1,
        top_k=draw(st.sampled_from((0, 0, 1, 3, 2**32 - 1))),
        logit_bias=draw(st.dictionaries(ids, biases, max_size=3)),
        allowed_token_ids=tuple(draw(st.lists(ids, max_size=4) if draw(st.booleans()) else st.just([]))),
        bad_words=tuple(draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4))),
        min_tokens=draw(st.sampled_from((0, 0, 2**32 - 1))),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=4))),
        eos_token_ids=(0, vocab_size + 1),
        num_logprobs=draw(st.sampled_from((None, 0, 3, 2**32 - 1))),
        **{name: draw(legal_values(name)) for name in RANGES},
    )
    return RowContext(params, len(history) + len(extra), len(prompt), history, extra)


@dataclass(frozen=True)
class Batch:
    """Rows of logits [R, V] with their contexts; `vocab_size` of the V columns are tokens."""

    vocab_size: int
    logits: torch.Tensor
    rows: list[RowContext]


@st.composite
def batches(draw: Any) -> Batch:
    """A few rows in a model's dtype, some of which may hold masks, NaN or infinity."""
    vocab_size = draw(st.sampled_from((1, 2, 5, 33, MAX_VOCAB_SIZE)))
    num_padding = draw(st.sampled_from((0, 3)))
    rows, values = [], []
    for _ in range(draw(st.integers(1, 4))):
        palette = draw(st.lists(st.sampled_from((*FINITE, MASK)), min_size=1, max_size=4))
        if draw(st.integers(0, 3)) == 0:
            palette.append(draw(st.sampled_from(POISON)))
        random = draw(st.randoms(use_true_random=False))
        values.append([random.choice(palette) for _ in range(vocab_size)] + [math.nan] * num_padding)
        rows.append(draw(contexts(vocab_size)))
    dtype = draw(st.sampled_from((torch.float32, torch.float32, torch.float16, torch.bfloat16)))
    return Batch(vocab_size, torch.tensor(values, dtype=torch.float64).to(dtype), rows)


def exact_scores(logits: torch.Tensor, row: RowContext) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scores with noise of all tokens in float64, and float32's largest error; None if no token can be drawn.

    Args:
        logits: [V] of the tokens.
        row: the context. The caller applies top-k, top-p and min-p.
    """
    raw = logits.to(torch.float64)
    if not bool((raw < math.inf).all()):
        return None
    params, adjusted = row.params, raw.clone()
    for token_id, bias in params.logit_bias.items():
        adjusted[token_id] += bias
    if params.has_penalties:
        assert row.history is not None
        counts = row.history.counts(row.extra_tokens)
        for token_id, num_output in zip(counts.token_ids.tolist(), counts.num_output.tolist(), strict=True):
            value = float(adjusted[token_id])
            value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
            value -= params.presence_penalty * (num_output > 0) + params.frequency_penalty * num_output
            adjusted[token_id] = value
    adjusted = torch.where(raw.isfinite(), adjusted.clamp(-LARGEST, LARGEST), adjusted)
    is_held_back = params.holds_back(row.position - row.num_prompt_tokens)
    for token_id in params.min_tokens_ids if is_held_back else ():
        if token_id < len(adjusted):
            adjusted[token_id] = -math.inf
    for token_id in set(range(len(adjusted))) - set(params.allowed_token_ids) if params.allowed_token_ids else ():
        adjusted[token_id] = -math.inf
    if float(without_bad_words(adjusted, row).max()) > -math.inf:
        adjusted = without_bad_words(adjusted, row)
    best = float(adjusted.max())
    if best == -math.inf:
        return None
    # Penalties and a logit may cancel, but the rounding error is of the size of the terms.
    size = adjusted.abs().nan_to_num(posinf=0.0) + raw.abs().nan_to_num(posinf=0.0) * 100 + abs(best) + 20_000
    slack = size * 2.0**-21
    if params.is_greedy:
        return adjusted, slack
    temperature = max(params.temperature, MIN_TEMPERATURE)
    keys = torch.tensor([noise_key(params.seed, params.choice, Purpose.PLAIN, row.position)])
    noise = gumbel(keys, torch.arange(len(adjusted)))[0].to(torch.float64)
    return (adjusted - best) / temperature + noise, slack / temperature + 1e-4


def without_bad_words(scores: torch.Tensor, row: RowContext) -> torch.Tensor:
    """Scores [V] with minus infinity for each token that ends a bad word."""
    left = scores.clone()
    for *before, last in row.params.bad_words:
        assert row.history is not None
        output = row.history.tail(row.extra_tokens)
        if last < len(left) and list(output[len(output) - len(before) :]) == before and len(before) <= len(output):
            left[last] = -math.inf
    return left


def all_results(sampler: Sampler, logits: torch.Tensor, rows: list[RowContext]) -> list[Any]:
    """Each row's results of every method of a sampler, comparable to the bit; all NaN are equal."""
    chosen = sampler.sample(logits, rows)
    candidates = sampler.candidates(logits, rows, 5)
    drafted = sampler.draft_sample(logits, rows, 64)
    sparse = sampler.draft_sample(logits, rows, 2)
    probs = sampler.probs(logits, rows).nan_to_num(nan=-1.0).view(torch.int32).tolist()
    return [repr(each) for each in zip(chosen, candidates, drafted, sparse, probs, strict=True)]
