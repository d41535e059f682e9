"""Computes the scores from which tokens are sampled, as transformers' processors and warpers do.

Every function is row-invariant: a row's bits do not depend on other rows. So sums that decide a cut are sums of
integers, which are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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

Named = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]
"""Places of tokens in flattened logits, and a value of each."""


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
    index, biases = biased_tokens(rows, logits.shape[1])
    if len(index):
        logits.view(-1).index_add_(0, _on(logits.device, index), _on(logits.device, biases))


def _penalize_(logits: Tensor, rows: Sequence[RowContext]) -> None:
    index, counts = counted_tokens(rows, logits.shape[1])
    if len(index):
        at, of_tokens = _on(logits.device, index), penalties_of(rows)[index // logits.shape[1]]
        flat = logits.view(-1)
        flat[at] = penalized(flat[at], _on(logits.device, counts), _on(logits.device, of_tokens))


def _hold_back_(logits: Tensor, rows: Sequence[RowContext]) -> None:
    index, _ = held_tokens(rows, logits.shape[1])
    if len(index):
        at, flat = _on(logits.device, index), logits.view(-1)
        values = flat[at]
        flat[at] = torch.where(values < math.inf, -math.inf, values)


def _on(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def biased_tokens(rows: Sequence[RowContext], vocab_size: int) -> Named:
    """Tokens with a bias, and their float32 biases, which are too small to make a finite logit infinite."""
    biased = [(r, row.params) for r, row in enumerate(rows) if row.params.logit_bias]
    return named_tokens([(r, params.bias_token_ids, params.bias_values) for r, params in biased], vocab_size, "f")


def counted_tokens(rows: Sequence[RowContext], vocab_size: int) -> Named:
    """Tokens of the rows with penalties, and `penalized`'s counts. Raises ValueError as `adjusted_logits` does."""
    named = []
    for r, row in enumerate(rows):
        if row.params.has_penalties:
            counts = _history(row).counts(row.extra_tokens)
            named.append((r, counts.token_ids, np.where(counts.seen, counts.num_output + 1, 0)))
    return named_tokens(named, vocab_size, "i")


def held_tokens(rows: Sequence[RowContext], vocab_size: int) -> Named:
    """Tokens that min_tokens forbids, and the number of positions for which it does, int32."""
    named = []
    for r, (row, params) in enumerate((row, row.params) for row in rows):
        num_output = row.position - row.num_prompt_tokens
        if params.holds_back(num_output) and not row.must_end:
            num_held = params.min_tokens - num_output
            named.append((r, params.min_tokens_ids, np.full(len(params.min_tokens_ids), num_held)))
    return named_tokens(named, vocab_size, "i")


def named_tokens(named: Sequence[tuple[int, Any, Any]], vocab_size: int, kind: str) -> Named:
    """Places [N] int64 of rows' tokens in logits [R, V], flattened, and their values [N] of a NumPy type.

    Args:
        named: rows, each with int64 token ids, of which those outside the vocabulary are left out, and their values.
        vocab_size: V.
        kind: code of the type.
    """
    ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(each, np.int64) for _, each, _ in named)])
    values = np.concatenate([np.empty(0, kind), *(np.asarray(each, kind) for _, _, each in named)])
    starts = np.repeat(np.array([r * vocab_size for r, *_ in named], np.int64), [len(each) for _, each, _ in named])
    is_there = (ids >= 0) & (ids < vocab_size)
    return (starts + ids)[is_there], values[is_there]


def penalties_of(rows: Sequence[RowContext]) -> npt.NDArray[np.float32]:
    """Repetition, presence and frequency penalty of each row, [R, 3]."""
    named = [(params.repetition_penalty, params.presence_penalty, params.frequency_penalty) for params, *_ in rows]
    return np.array(named, np.float32).reshape(-1, 3)


def penalized(values: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Logits after penalties; finite ones stay finite, and infinite ones and NaN stay unchanged.

    Args:
        values: logits, of any shape.
        counts: int32, 0 for a token that is neither in the prompt nor in the output, else 1 more than its number of
            occurrences in the output.
        penalties: of the values, as in `penalties_of`.
    """
    repetition, presence, frequency = penalties.unbind(-1)
    changed = torch.where(values < 0, values * repetition, values / repetition)
    changed = changed - presence * (counts > 1)
    changed = changed - frequency * (counts - 1)
    return torch.where((counts > 0) & (values.abs() < math.inf), changed.clamp_(-_LARGEST, _LARGEST), values)


def _history(row: RowContext) -> TokenHistory:
    if row.history is None or len(row.history) + len(row.extra_tokens) != row.position:
        raise ValueError(f"penalties and bad words at position {row.position} need the history of all tokens before it")
    return row.history


def _banned(row: RowContext) -> set[int]:
    """Tokens that would complete a bad word."""
    return row.params.banned_after(_history(row).tail(row.extra_tokens)) if row.params.bad_words else set()


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


def cut_arguments(rows: Sequence[RowContext]) -> tuple[list[int], list[float], list[float]]:
    """The arguments of `cut_` for these rows."""
    top_k = [max(row.params.top_k, 0) for row in rows]
    top_p = [row.params.top_p for row in rows]
    min_score = [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows]
    return top_k, top_p, min_score


def row_numbers(rows: Sequence[RowContext], vocab_size: int) -> npt.NDArray[np.float64]:
    """What scales and cuts rows of V logits, [R, 5]: 1 and the temperature (0 and 1 if greedy), top-k (V is off), top-p
    (1 is off), and the lowest score that min-p allows (minus infinity is off). A greedy row has no cuts."""
    numbers = np.ones((len(rows), 5))
    top_k, top_p, min_score = cut_arguments(rows)
    temperatures = [max(row.params.temperature, MIN_TEMPERATURE) for row in rows]
    numbers[:, 1:] = np.array([temperatures, [min(k or vocab_size, vocab_size) for k in top_k], top_p, min_score]).T
    numbers[[row.params.is_greedy for row in rows]] = 0.0, 1.0, vocab_size, 1.0, -math.inf
    return numbers


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
