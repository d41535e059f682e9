"""Sampling in Triton: hashes equal the CPU's, scores are rounded as on the CPU, and ties go to the lowest id.

Noise is -log(-log(1 - u)) in float64, rounded once to float32. As u has 33 bits, 1 - u is exact: the inner logarithm
equals the ``log1p`` of ``noise.py`` up to the last bits of a float64.
"""

import triton
import triton.language as tl

NO_ID = tl.constexpr(2147483647)


@triton.jit
def row_peak_kernel(logits, part_peak, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of each chunk, plus infinity if a logit is NaN; grid (rows, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < VOCAB, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)
    tl.store(part_peak + row * tl.num_programs(1) + chunk, tl.max(x, 0))


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
def _store_best(scores, ids, to_scores, to_ids, NUM_TOP: tl.constexpr):
    """Store the best scores with their ids, best first, ties by rising id; id 0 for a score of minus infinity."""
    for i in tl.static_range(NUM_TOP):
        best = tl.max(scores, 0)
        best_id = tl.min(tl.where(scores == best, ids, NO_ID), 0)
        tl.store(to_scores + i, best)
        tl.store(to_ids + i, tl.where(best > float("-inf"), best_id, 0))
        scores = tl.where(ids == best_id, float("-inf"), scores)


# Rows' parameters and results are parts of packed copies: kernels are compiled once for all alignments.
@triton.jit(do_not_specialize_on_alignment=["rows"])
def draw_kernel(
    logits,
    rows,
    part_peak,
    part_scores,
    part_ids,
    row_stride,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    NUM_TOP: tl.constexpr,
):
    """The best tokens of each chunk by score plus noise; grid (rows, chunks). ``rows`` [R, 3]: keys, temperature."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK_CHUNKS)
    best = tl.max(tl.load(part_peak + row * NUM_CHUNKS + c, mask=c < NUM_CHUNKS, other=float("-inf")), 0)
    first_key = tl.load(rows + row * 3).to(tl.uint32, bitcast=True)
    second_key = tl.load(rows + row * 3 + 1).to(tl.uint32, bitcast=True)
    temperature = tl.load(rows + row * 3 + 2).to(tl.float32, bitcast=True)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * row_stride + ids, mask=ids < VOCAB, other=float("-inf"))
    if temperature > 0.0:
        noise = gumbel(hash_u32(ids.to(tl.uint32), first_key, second_key))
        scores = tl.div_rn(scores - best, tl.zeros_like(scores) + temperature) + noise
    scores = tl.where(tl.abs(best) < float("inf"), scores, float("-inf"))
    scores = tl.where(ids < VOCAB, scores, float("-inf"))
    part = (row * NUM_CHUNKS + chunk) * NUM_TOP
    _store_best(scores, ids, part_scores + part, part_ids + part, NUM_TOP)


@triton.jit(do_not_specialize_on_alignment=["out"])
def merge_kernel(
    part_peak,
    part_scores,
    part_ids,
    out,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    NUM_TOP: tl.constexpr,
):
    """The best tokens of a row among those of its chunks; grid (rows,). ``out`` [R, 2, NUM_TOP]: ids, then scores as
    bits.

    Scores are NaN if the row's best logit is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_CHUNKS)
    best = tl.max(tl.load(part_peak + row * NUM_CHUNKS + c, mask=c < NUM_CHUNKS, other=float("-inf")), 0)
    i = tl.arange(0, BLOCK_PARTS)
    part, is_part = row * NUM_CHUNKS * NUM_TOP + i, i < NUM_CHUNKS * NUM_TOP
    scores = tl.load(part_scores + part, mask=is_part, other=float("-inf"))
    ids = tl.where(scores > float("-inf"), tl.load(part_ids + part, mask=is_part, other=NO_ID), NO_ID)
    is_drawn = tl.abs(best) < float("inf")
    for n in tl.static_range(NUM_TOP):
        score = tl.max(scores, 0)
        token_id = tl.min(tl.where(scores == score, ids, NO_ID), 0)
        tl.store(out + (row * 2) * NUM_TOP + n, tl.where(score > float("-inf"), token_id, 0))
        told = tl.where(is_drawn, score, float("nan"))
        tl.store(out + (row * 2 + 1) * NUM_TOP + n, told.to(tl.int32, bitcast=True))
        scores = tl.where(ids == token_id, float("-inf"), scores)
