"""Computes the scores from which tokens are sampled, as transformers' processors and warpers do.

Every function is row-invariant: a row's bits do not depend on other rows. So sums that decide a cut are sums of
integers, which are exact in any order.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.engine.sampling.restrictions import ban_, keep_allowed_
from specdec.engine.sampling.token_history import TokenHistory
from specdec.wire.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-30
"""Least temperature; lower ones are raised to it, which is as good as greedy and avoids 0/0."""
WEIGHT_ONE = 2.0**42
"""Integer weight of exp(0); 2^20 tokens sum to less than 2^63."""
_LARGEST = torch.finfo(torch.float32).max
_EXP_COEFFICIENTS = tuple(1.0 / math.factorial(k) for k in range(11, -1, -1))

CutArguments = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""By row: top-k (0 is off), top-p (1 is off), and the lowest score that min-p allows (minus infinity is off)."""


class RowContext(NamedTuple):
    """The sampler's data of one row, besides its logits."""

    params: SamplingParams
    position: int
    """Absolute position (index in prompt plus output) of the token to be sampled."""
    num_prompt_tokens: int
    history: TokenHistory | None = None
    """History of the session's committed tokens; read only if `params.needs_history`."""
    extra_tokens: tuple[int, ...] = ()
    """Uncommitted tokens between the committed ones and `position`: a tree node and its ancestors."""
    must_end: bool = False
    """The constraint allows only tokens that `min_tokens` would forbid, so `min_tokens` is ignored."""


def adjusted_logits(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """Logits after bias, penalties, min_tokens, allowed tokens and bad words; the argument itself if no row has any.

    Finite logits stay finite (saturating at the largest float32), except of forbidden tokens. NaN and plus infinity
    stay, so that later checks find them.

    Args:
        logits: [R, V] float32, not changed.
        rows: R contexts.

    Raises:
        ValueError: a row with penalties or bad words lacks a history that fits its position.
    """
    if not any(row.params.adjusts_logits for row in rows):
        return logits
    adjusted = logits.clone(memory_format=torch.contiguous_format)
    _add_bias_(adjusted, rows)
    _penalize_(adjusted, rows)
    _hold_back_(adjusted, rows)
    keep_allowed_(adjusted, [(r, row.params.allowed_ids) for r, row in enumerate(rows) if row.params.allowed_ids])
    ban_(adjusted, [(r, banned) for r, row in enumerate(rows) if (banned := _banned(row))])
    return adjusted


def _add_bias_(logits: Tensor, rows: Sequence[RowContext]) -> None:
    biased_rows = [(r, row.params) for r, row in enumerate(rows) if row.params.logit_bias]
    if not biased_rows:
        return
    vocab_size = logits.shape[1]
    index, within = _flat_index([(r, params.bias_token_ids) for r, params in biased_rows], vocab_size)
    bias = np.concatenate([np.frombuffer(params.bias_values, dtype=np.float32) for _, params in biased_rows])[within]
    flat_index = torch.from_numpy(index).to(logits.device, non_blocking=True)
    flat = logits.view(-1)
    values = flat[flat_index]
    flat[flat_index] = _saturated(values + torch.from_numpy(bias).to(logits.device, non_blocking=True), values)


def _flat_index(
    token_ids: Sequence[tuple[int, array[int]]], vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Indices [M] of the rows' tokens in flattened logits, and a mask [N] of tokens inside the vocabulary."""
    ids = np.concatenate([np.frombuffer(of_row, dtype=np.int64) for _, of_row in token_ids])
    starts = np.repeat([r * vocab_size for r, _ in token_ids], [len(of_row) for _, of_row in token_ids])
    within = (ids >= 0) & (ids < vocab_size)
    return (starts + ids)[within], within


def _penalize_(logits: Tensor, rows: Sequence[RowContext]) -> None:
    vocab_size = logits.shape[1]
    index_parts, seen_parts, output_parts, sizes = [], [], [], []
    penalties: list[tuple[float, float, float]] = []
    for r, row in enumerate(rows):
        params = row.params
        if not params.has_penalties:
            continue
        counts = _history(row).counts(row.extra_tokens)
        index_parts.append(counts.token_ids + r * vocab_size)
        seen_parts.append(counts.seen)
        output_parts.append(counts.num_output)
        sizes.append(len(counts.token_ids))
        penalties.append((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
    if not sizes:
        return
    device = logits.device
    # [N] each, N = distinct tokens of all rows together
    flat_index = torch.from_numpy(np.concatenate(index_parts)).to(device, non_blocking=True)
    seen = torch.from_numpy(np.concatenate(seen_parts)).to(device, non_blocking=True)
    num_output = torch.from_numpy(np.concatenate(output_parts)).to(device, non_blocking=True)
    table = np.repeat(np.array(penalties, dtype=np.float32), sizes, axis=0)
    repetition, presence, frequency = torch.from_numpy(table).to(device, non_blocking=True).unbind(1)

    flat = logits.view(-1)
    values = flat[flat_index]
    repeated = torch.where(values < 0, values * repetition, values / repetition)
    penalized = torch.where(seen, repeated, values)
    penalized = penalized - presence * (num_output > 0)
    penalized = penalized - frequency * num_output
    flat[flat_index] = _saturated(penalized, values)


def _history(row: RowContext) -> TokenHistory:
    if row.history is None or len(row.history) + len(row.extra_tokens) != row.position:
        raise ValueError(f"penalties and bad words at position {row.position} need the history of all tokens before it")
    return row.history


def _banned(row: RowContext) -> set[int]:
    """Tokens that would complete a bad word."""
    return row.params.banned_after(_history(row).tail(row.extra_tokens)) if row.params.bad_words else set()


def _saturated(adjusted: Tensor, values: Tensor) -> Tensor:
    """The adjusted values, clamped to finite; infinite values and NaN stay unchanged."""
    return torch.where(values.abs() < math.inf, adjusted.clamp_(-_LARGEST, _LARGEST), values)


def _hold_back_(logits: Tensor, rows: Sequence[RowContext]) -> None:
    held_back = [
        (r, row.params.min_tokens_ids)
        for r, row in enumerate(rows)
        if not row.must_end and row.params.holds_back(row.position - row.num_prompt_tokens)
    ]
    if held_back:
        flat_index = torch.from_numpy(_flat_index(held_back, logits.shape[1])[0]).to(logits.device, non_blocking=True)
        flat = logits.view(-1)
        values = flat[flat_index]
        flat[flat_index] = torch.where(values < math.inf, -math.inf, values)


def temperature_scores(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """(logits - best of the row) / temperature: [R, V] float32, at most 0.

    Subtracting the best first keeps precision and range at any temperature and changes no probability. A row whose best
    is not finite becomes all NaN.
    """
    divisors = torch.tensor(
        [[max(temperature, MIN_TEMPERATURE)] for temperature in temperatures],
        dtype=torch.float32,
        device=logits.device,
    )
    best = logits.amax(dim=1, keepdim=True)
    best = best - best * 0.0  # itself if it is finite, else NaN
    return (logits - best).div_(divisors)


def cut_arguments(rows: Sequence[RowContext]) -> CutArguments:
    """The arguments of `cut_` for these rows."""
    top_k = [max(row.params.top_k, 0) for row in rows]
    top_p = [row.params.top_p for row in rows]
    min_score = [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows]
    return top_k, top_p, min_score


def cut_(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_score: Sequence[float]) -> Tensor:
    """Set scores outside top-k, top-p and min-p to minus infinity, in place, and return them.

    A prefix of the tokens stays, in descending order of score and ascending order of id: down to the k-th score (with
    all its ties), while the mass before a token is below top_p of the mass that top-k kept, and down to `min_score`.
    The first token always stays. Rows of NaN keep at least one NaN.

    Args:
        scores: [R, V] float32 of `temperature_scores`.
        top_k: R counts, 0 is off.
        top_p: R masses, 1 is off.
        min_score: R scores, minus infinity is off.
    """
    vocab_size, device = scores.shape[1], scores.device
    ordered, token_ids = torch.sort(scores, dim=1, descending=True, stable=True)  # [R, V]
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if any(top_k):
        last = torch.tensor([[min(k or vocab_size, vocab_size) - 1] for k in top_k], device=device)
        keep &= ordered >= ordered.gather(1, last)
    if any(p < 1.0 for p in top_p):
        mass = torch.tensor([[p] for p in top_p], dtype=torch.float64, device=device)
        weights = integer_weights(ordered).masked_fill_(~keep, 0)
        inclusive = weights.cumsum(dim=1)
        limit = (inclusive[:, -1:].to(torch.float64) * mass).ceil_().to(torch.int64)
        keep &= ((inclusive - weights) < limit) | (mass >= 1.0)
    keep &= ordered >= torch.tensor(min_score, dtype=torch.float32, device=device).unsqueeze(1)
    keep[:, 0] = True
    kept = torch.empty_like(keep).scatter_(1, token_ids, keep)
    return scores.masked_fill_(~kept, -math.inf)


def integer_weights(scores: Tensor) -> Tensor:
    """exp(scores) in units of 2^-42, rounded down to int64, for scores of at most 0.

    Integer sums do not depend on their order, and single float64 multiplications and additions are the same on all
    machines, unlike `torch.exp`. Relative error below 2^-40.
    """
    x = scores.to(torch.float64).clamp_(min=-64.0)
    n = (x * 1.4426950408889634).sub_(0.5).trunc_()
    r = x - n * 0.6931471805599453
    y = torch.full_like(r, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        y.mul_(r).add_(coefficient)
    return y.mul_(WEIGHT_ONE).to(torch.int64) >> n.neg_().to(torch.int64)
