"""Top-k, top-p and min-p on the device: ``logit_processors.cut_`` to the bit, without a sort and without waiting.

The kept tokens are found digit by digit, by sums of integers. Scores are at most 0, so a score's bits without its sign,
its *rank*, rise as the score falls. A search finds the least rank up to which tokens reach a goal: their number for
top-k, their weight for top-p. Each of its eight steps sums the tokens that match the bits found so far, by chunk and by
their next four bits; the next step adds up the chunks and picks the digit. Sums of integers have the same bits in any
order, and weights are those of ``logit_processors.integer_weights``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from specdec.engine.cuda.launch import launch, power_of_two
from specdec.engine.cuda.sampling import device_perturbed_top

NO_LIMIT = tl.constexpr(0x7FFFFFFFFFFFFFFF)
CUT_NUMBERS = tl.constexpr(4)
STATE_WORDS = tl.constexpr(3)
DIGITS = tl.constexpr(16)
NUM_CUT_NUMBERS = int(CUT_NUMBERS.value)
"""Number of float64 numbers of a row in the result of ``cut_parameters``."""
CutArguments = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""Rows' top-k, top-p and lowest score that min-p allows, from ``logit_processors.cut_arguments``."""
_BLOCK = 2048
_NUM_STEPS = 8


@triton.jit
def _weight(score):
    """exp(score) in units of 2^-42, to the bit that of ``integer_weights``."""
    x = tl.where(score > -64.0, score, -64.0).to(tl.float64)
    n = (x * 1.4426950408889634 - 0.5).to(tl.int64)
    r = x - n.to(tl.float64) * 0.6931471805599453
    y = tl.zeros_like(r) + 2.505210838544172e-08
    y = y * r + 2.755731922398589e-07
    y = y * r + 2.7557319223985893e-06
    y = y * r + 2.48015873015873e-05
    y = y * r + 0.0001984126984126984
    y = y * r + 0.001388888888888889
    y = y * r + 0.008333333333333333
    y = y * r + 0.041666666666666664
    y = y * r + 0.16666666666666666
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    return (y * 4398046511104.0).to(tl.int64) >> tl.minimum(-n, 63)  # a shift by 64 or more is undefined in LLVM


# Rows' parameters are a part of a packed copy: the kernel is compiled once for all alignments.
@triton.jit(do_not_specialize=["step", "num_rows"], do_not_specialize_on_alignment=["cuts"])
def cut_kernel(
    scores, cuts, states, partials, step, num_rows,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    BY_WEIGHT: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """One step of the search for top-p if ``BY_WEIGHT``, else for top-k; grid (rows, chunks). The last one, after those
    that sum, sets the scores of cut tokens to minus infinity, in place.

    ``cuts`` [R, 4] float64: the second is top-k, the third top-p. ``states`` [steps, R, 3]: the rank found before a
    step, the sum below that rank, the goal (0: not known yet). ``partials`` [steps, R, chunks, 16]: a step's sums.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, digits = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, DIGITS)
    rank, below, goal = row * 0, row * 0, row * 0
    shift = 28 - 4 * step
    before = partials + ((step - 1) * num_rows + row) * NUM_CHUNKS * DIGITS
    digit = step * 0
    if IS_FIRST:
        if not BY_WEIGHT:
            goal = tl.load(cuts + row * CUT_NUMBERS + 1).to(tl.int64)
    else:
        state = states + ((step - 1) * num_rows + row) * STATE_WORDS
        rank, below, goal = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        places = before + c[:, None] * DIGITS + digits[None, :]
        totals = tl.sum(tl.load(places, mask=c[:, None] < NUM_CHUNKS, other=0), 0)
        if BY_WEIGHT:
            # Limit of the summed weight before a token, below which the token is kept; at least 1, for the best token.
            top_p = tl.load(cuts + row * CUT_NUMBERS + 2)
            limit = tl.maximum(tl.ceil(tl.sum(totals, 0).to(tl.float64) * top_p).to(tl.int64), 1)
            goal = tl.where(goal == 0, tl.where(top_p < 1.0, limit, NO_LIMIT), goal)
        is_before = tl.cumsum(totals, 0) + below < goal
        digit = tl.minimum(tl.sum(is_before.to(tl.int32), 0), DIGITS - 1)
        below += tl.sum(tl.where(digits < digit, totals, 0), 0)
        rank |= digit.to(tl.int64) << (shift + 4)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * VOCAB + ids, mask=ids < VOCAB, other=0.0)
    ranks = (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    if IS_LAST:
        stays = ranks <= rank
        if BY_WEIGHT:
            # Tokens of one rank have equal weights; the lowest ids are kept.
            earlier = below + tl.sum(tl.load(before + c * DIGITS + digit, mask=c < chunk, other=0), 0)
            tied = tl.where((ids < VOCAB) & (ranks == rank), _weight(score), 0)
            stays &= (ranks < rank) | (earlier + tl.cumsum(tied, 0) - tied < goal)
        tl.store(scores + row * VOCAB + ids, tl.where(stays, score, float("-inf")), mask=ids < VOCAB)
    else:
        if chunk == 0:
            state = states + (step * num_rows + row) * STATE_WORDS
            tl.store(state, rank)
            tl.store(state + 1, below)
            tl.store(state + 2, goal)
        is_here = (ids < VOCAB) & ((ranks >> (shift + 4)) == (rank >> (shift + 4)))
        each = tl.where(is_here, _weight(score), 0) if BY_WEIGHT else is_here.to(tl.int64)
        to = partials + ((step * num_rows + row) * NUM_CHUNKS + chunk) * DIGITS
        for d in tl.static_range(DIGITS):
            tl.store(to + d, tl.sum(tl.where(((ranks >> shift) & 15) == d, each, 0), 0))


class CutKinds(NamedTuple):
    """The cuts that need a search over the vocabulary, of nine launches each; min-p needs none."""

    has_top_k: bool = False
    has_top_p: bool = False


def cut_parameters(temperatures: Sequence[float], cuts: CutArguments, vocab_size: int) -> tuple[torch.Tensor, CutKinds]:
    """Rows' parameters for ``launch_cuts``, ``[R, 4]`` float64 on the host, and the kinds of their cuts.

    Args:
        temperatures: R values; 0 for a row that is not cut.
        cuts: cuts of R rows.
        vocab_size: number of tokens of a row.
    """
    numbers = np.empty((len(temperatures), NUM_CUT_NUMBERS))
    top_k = [min(k or vocab_size, vocab_size) for k in cuts[0]]
    numbers.T[:] = temperatures, top_k, *cuts[1:]
    numbers[numbers[:, 0] == 0.0] = 0.0, vocab_size, 1.0, -math.inf
    return torch.from_numpy(numbers), CutKinds(
        bool((numbers[:, 1] < vocab_size).any()), bool((numbers[:, 2] < 1.0).any())
    )


def launch_cuts(logits: torch.Tensor, cuts: torch.Tensor, kinds: CutKinds) -> torch.Tensor:
    """``(logit - best) / temperature`` with minus infinity for cut tokens, ``[R, V]``; no operation waits for data.

    Rows of temperature 0 keep their logits; other rows whose best logit is not finite are NaN throughout.
    Cost: ten of torch's small operations, and nine launches for each of ``kinds``. One program per row would take one
    launch, but a row's 0.5 MB pass through one multiprocessor at 0.1 TB/s: 5 us for each of its passes, and 40 us where
    it computes weights, of which a search needs eight.

    Args:
        logits: ``[R, V]`` float32, not changed.
        cuts: result of ``cut_parameters``, on the same device.
        kinds: kinds of the rows' cuts; more kinds change nothing but the cost.
    """
    num_rows, vocab_size = logits.shape
    temperature, _, _, least = cuts.float().unsqueeze(2).unbind(1)
    is_greedy = temperature == 0.0
    best = logits.amax(dim=1, keepdim=True)
    best = (best - best * 0.0).masked_fill_(is_greedy, 0.0)  # NaN where it is not finite
    scores = (logits - best).div_(temperature.masked_fill(is_greedy, 1.0))
    num_chunks = -(-vocab_size // _BLOCK)
    states = torch.empty(_NUM_STEPS, num_rows, int(STATE_WORDS.value), dtype=torch.int64, device=logits.device)
    shape = (_NUM_STEPS, num_rows, num_chunks, int(DIGITS.value))
    partials = torch.empty(shape, dtype=torch.int64, device=logits.device)
    searches = [by_weight for by_weight, is_on in enumerate(kinds) if is_on]
    for by_weight, step in itertools.product(searches, range(_NUM_STEPS + 1)):
        launch(
            cut_kernel,
            (num_rows, num_chunks),
            scores=scores,
            cuts=cuts,
            states=states,
            partials=partials,
            step=step,
            num_rows=num_rows,
            VOCAB=vocab_size,
            NUM_CHUNKS=num_chunks,
            BLOCK=_BLOCK,
            BLOCK_CHUNKS=power_of_two(num_chunks),
            BY_WEIGHT=bool(by_weight),
            IS_FIRST=step == 0,
            IS_LAST=step == _NUM_STEPS,
            options={"num_warps": 4, "enable_fp_fusion": False},
        )
    return scores.masked_fill_(scores < least, -math.inf)


def device_cuts(logits: torch.Tensor, temperatures: Sequence[float], cuts: CutArguments) -> torch.Tensor:
    """``launch_cuts`` for parameters on the host. Cost: one more copy to the device."""
    numbers, kinds = cut_parameters(temperatures, cuts, logits.shape[1])
    return launch_cuts(logits, numbers.to(logits.device, non_blocking=True), kinds)


def compile_draws(num_logits: int, vocab_size: int, device: torch.device) -> None:
    """Draw once with every combination of cuts, so that no stream waits for the compiler.

    Cost: up to ten seconds if the kernels are not in the compiler's cache.

    Args:
        num_logits: columns of the model's logits.
        vocab_size: number of token ids; columns from here on are padding.
        device: device of the logits.
    """
    for width in {num_logits, vocab_size}:  # the alignment of rows decides which variant is compiled
        logits = torch.zeros(1, width, device=device)[:, :vocab_size]
        device_perturbed_top(logits, [1.0], [0, 0], 1)
        device_cuts(logits, [1.0], ([1], [0.5], [-math.inf]))
