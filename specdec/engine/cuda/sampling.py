"""From logits to tokens on the device, without a sort and without waiting: temperature, cuts, noise, the best tokens.

Top-k and top-p keep what ``logit_processors.cut_`` keeps, to the bit. The kept tokens are found digit by digit, by sums
of integers. Scores are at most 0, so a score's bits without its sign, its *rank*, rise as the score falls. A search
finds the least rank up to which tokens reach a goal: their number for top-k, their weight for top-p. Each of its eight
steps sums the tokens that match the bits found so far, by chunk and by their next four bits; the next step adds up the
chunks and picks the digit. Sums of integers have the same bits in any order, and weights are those of
``logit_processors.integer_weights``.

Hashes and scores equal the CPU's, and ties go to the lowest id. Noise is -log(-log(1 - u)) in float64, rounded to
float32. As u has 33 bits, 1 - u is exact: the logarithm equals the ``log1p`` of ``noise.py`` but for its last bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from specdec.engine.batch import to_device
from specdec.engine.cuda.launch import launch, power_of_two

MOST_TOP = 16
"""Most tokens per row that the kernels find."""
_BLOCK, _CUT_BLOCK = 1024, 2048
_NUM_STEPS = 8
LARGEST_ID = tl.constexpr(0x7FFFFFFF)
CutKinds = tuple[bool, bool]
"""Whether there is top-k and top-p: cuts that need a search over the vocabulary, of nine launches each."""
NOTHING = tl.constexpr(-0x8000000000000000)
NO_LIMIT = tl.constexpr(0x7FFFFFFFFFFFFFFF)
ROW_NUMBERS = tl.constexpr(5)
STATE_WORDS = tl.constexpr(3)
DIGITS = tl.constexpr(16)
EXP_COEFFICIENTS = tl.constexpr(tuple(1.0 / math.factorial(k) for k in range(11, -1, -1)))


@triton.jit
def _weight(score):
    """exp(score) in units of 2^-42, to the bit that of ``integer_weights``."""
    x = tl.where(score > -64.0, score, -64.0).to(tl.float64)
    n = (x * 1.4426950408889634 - 0.5).to(tl.int64)
    r = x - n.to(tl.float64) * 0.6931471805599453
    y = tl.zeros_like(r)
    for i in tl.static_range(12):
        y = y * r + EXP_COEFFICIENTS[i]
    return (y * 4398046511104.0).to(tl.int64) >> tl.minimum(-n, 63)  # a shift by 64 or more is undefined in LLVM


# Rows' numbers and keys are parts of packed copies: a kernel is compiled once for all alignments.
@triton.jit(do_not_specialize=["step", "num_rows"], do_not_specialize_on_alignment=["numbers"])
def cut_kernel(
    scores, numbers, states, partials, step, num_rows,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    BY_WEIGHT: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """One step of the search for top-p if ``BY_WEIGHT``, else for top-k; grid (rows, chunks). The last one, after those
    that sum, sets the scores of cut tokens to minus infinity, in place.

    ``numbers``: of ``row_numbers``. ``states`` [steps, R, 3]: the rank found before a step, the sum below that rank,
    the goal (0: not known yet). ``partials`` [steps, R, chunks, 16]: a step's sums.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, digits = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, DIGITS)
    rank, below, goal = row * 0, row * 0, row * 0
    shift = 28 - 4 * step
    before = partials + ((step - 1) * num_rows + row) * NUM_CHUNKS * DIGITS
    digit = step * 0
    if IS_FIRST:
        if not BY_WEIGHT:
            goal = tl.load(numbers + row * ROW_NUMBERS + 2).to(tl.int64)
    else:
        state = states + ((step - 1) * num_rows + row) * STATE_WORDS
        rank, below, goal = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        places = before + c[:, None] * DIGITS + digits[None, :]
        totals = tl.sum(tl.load(places, mask=c[:, None] < NUM_CHUNKS, other=0), 0)
        if BY_WEIGHT:
            # Limit of the summed weight before a token, below which the token is kept; at least 1, for the best token.
            top_p = tl.load(numbers + row * ROW_NUMBERS + 3)
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


def cut_kinds(numbers: npt.NDArray[np.float64], vocab_size: int) -> CutKinds:
    """The kinds of cuts that rows with these ``row_numbers`` have."""
    return bool((numbers[:, 2] < vocab_size).any()), bool((numbers[:, 3] < 1.0).any())


def launch_scores(logits: torch.Tensor, numbers: torch.Tensor, kinds: CutKinds) -> torch.Tensor:
    """``(logit - best) / temperature`` with minus infinity for cut tokens, ``[R, V]``; no operation waits for data.

    Greedy rows keep their logits. Rows whose best logit is not finite are NaN throughout.

    Cost: nine of torch's operations, and nine launches for each of ``kinds``.

    Args:
        logits: ``[R, V]`` float32, not changed.
        numbers: result of ``row_numbers``, on the same device.
        kinds: kinds of the rows' cuts; more kinds change nothing but the cost.
    """
    num_rows, vocab_size = logits.shape
    is_scaled, temperature, _, _, least = numbers.float().unsqueeze(2).unbind(1)
    best = logits.amax(dim=1, keepdim=True)
    scores = (logits - (best * is_scaled - best * 0.0)).div_(temperature).contiguous()
    num_chunks = -(-vocab_size // _CUT_BLOCK)
    searches = [by_weight for by_weight, is_on in enumerate(kinds) if is_on]
    of_steps = (_NUM_STEPS if searches else 0, num_rows)
    states = torch.empty(*of_steps, STATE_WORDS.value, dtype=torch.int64, device=logits.device)
    partials = torch.empty(*of_steps, num_chunks, DIGITS.value, dtype=torch.int64, device=logits.device)
    for by_weight, step in itertools.product(searches, range(_NUM_STEPS + 1)):
        launch(
            cut_kernel,
            (num_rows, num_chunks),
            scores=scores,
            numbers=numbers,
            states=states,
            partials=partials,
            step=step,
            num_rows=num_rows,
            VOCAB=vocab_size,
            NUM_CHUNKS=num_chunks,
            BLOCK=_CUT_BLOCK,
            BLOCK_CHUNKS=power_of_two(num_chunks),
            BY_WEIGHT=bool(by_weight),
            IS_FIRST=step == 0,
            IS_LAST=step == _NUM_STEPS,
            options={"num_warps": 4, "enable_fp_fusion": False},
        )
    return scores.masked_fill_(scores < least, -math.inf)


def device_scores(logits: torch.Tensor, numbers: npt.NDArray[np.float64]) -> torch.Tensor:
    """``launch_scores`` for numbers on the host. Cost: one more copy to the device."""
    on_device = torch.from_numpy(numbers).to(logits.device, non_blocking=True)
    return launch_scores(logits, on_device, cut_kinds(numbers, logits.shape[1]))


@triton.jit
def _mix(
    x, SHIFT_1: tl.constexpr, MUL_1: tl.constexpr, SHIFT_2: tl.constexpr, MUL_2: tl.constexpr, SHIFT_3: tl.constexpr
):
    x ^= x >> SHIFT_1
    x *= MUL_1
    x ^= x >> SHIFT_2
    x *= MUL_2
    x ^= x >> SHIFT_3
    return x


@triton.jit
def hash_u32(ids, first_key, second_key):
    """``noise.hash_u32`` of ids and keys, all uint32."""
    x = _mix(ids ^ first_key, 16, 0x7FEB352D, 15, 0x846CA68B, 16)
    return _mix(x ^ second_key, 16, 0x21F0AAAD, 15, 0xD35A2D97, 15)


@triton.jit
def gumbel(hashes):
    """``noise.gumbel_from_bits`` of hashes."""
    u = (hashes.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@triton.jit
def _store_best(scored, to, NUM_TOP: tl.constexpr):
    for i in tl.static_range(NUM_TOP):
        best = tl.max(scored, 0)
        tl.store(to + i, best)
        scored = tl.where(scored == best, NOTHING, scored)


@triton.jit(do_not_specialize_on_alignment=["numbers", "keys"])
def draw_kernel(scores, numbers, keys, parts, VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_TOP: tl.constexpr):
    """The best scored ids of each chunk by score, plus noise by ``keys`` [R, 2] unless greedy; grid (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    if tl.load(numbers + row * ROW_NUMBERS) > 0.0:
        first_key = tl.load(keys + row * 2).to(tl.uint32, bitcast=True)
        second_key = tl.load(keys + row * 2 + 1).to(tl.uint32, bitcast=True)
        score += gumbel(hash_u32(ids.to(tl.uint32), first_key, second_key))
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # minus zero equals zero
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    scored = tl.where(ids < VOCAB, (rising << 32) | (ids ^ LARGEST_ID).to(tl.int64), NOTHING)
    _store_best(scored, parts + (row * tl.num_programs(1) + chunk) * NUM_TOP, NUM_TOP)


def launch_top(scores: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor, num_top: int) -> torch.Tensor:
    """The best tokens, ``[R, num_top]`` scored ids (``scored_ids.py``) on the device. No operation waits for data.

    Args:
        scores: ``[R, V]`` float32, result of ``launch_scores``.
        numbers: result of ``row_numbers``, on the same device.
        keys: ``[R, 2]`` int32 on the same device, the bits of ``noise.noise_key``; without meaning for greedy rows.
        num_top: tokens per row, from 1 to ``MOST_TOP``, at most V.
    """
    num_rows, vocab_size = scores.shape
    num_chunks = -(-vocab_size // _BLOCK)
    parts = torch.empty(num_rows, num_chunks * num_top, dtype=torch.int64, device=scores.device)
    launch(
        draw_kernel,
        (num_rows, num_chunks),
        scores=scores,
        numbers=numbers,
        keys=keys,
        parts=parts,
        VOCAB=vocab_size,
        BLOCK=_BLOCK,
        NUM_TOP=num_top,
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    return parts.topk(num_top).values


def start_draws(
    logits: torch.Tensor, numbers: npt.NDArray[np.float64], keys: Sequence[int], num_top: int
) -> Callable[[], torch.Tensor]:
    """Launch draws of the best ``num_top`` tokens of each row, up to ``MOST_TOP``; the result waits for scored ids.

    The tokens and scores are those of ``perturbed_top.perturbed_top`` after temperature and cuts. Cost: a copy to the
    device, the launches of ``launch_scores`` and ``launch_top``, and a copy back.

    ``numbers``: rows' ``row_numbers``; ``keys``: two u32 of each row's noise key.
    """
    bits = numbers.reshape(-1).view(np.int64), np.array(keys, np.uint32).view(np.int32)
    [of_rows], [of_noise] = to_device([bits[0]], [bits[1]], logits.device)
    placed = of_rows.view(torch.float64).view(numbers.shape)
    scores = launch_scores(logits, placed, cut_kinds(numbers, logits.shape[1]))
    out = launch_top(scores, placed, of_noise.view(-1, 2), num_top)
    if not out.is_cuda:  # interpreted kernels
        return lambda: out
    on_host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)  # a copy to other memory would wait
    on_host.copy_(out, non_blocking=True)
    end: torch.cuda.Event = torch.cuda.Event()
    end.record(torch.cuda.current_stream(out.device))

    def found() -> torch.Tensor:
        end.synchronize()
        return on_host

    return found
