"""Sampling in Triton: hashes equal the CPU's, scores are rounded as on the CPU, and ties go to the lowest id.

Noise is -log(-log(1 - u)) in float64, rounded once to float32. As u has 33 bits, 1 - u is exact: the inner logarithm
equals the ``log1p`` of ``noise.py`` up to the last bits of a float64.

A *scored id* is an int64 that orders tokens by score, then by falling id: the score's bits, made to rise with it, above
the id's distance from the largest id.
"""

import triton
import triton.language as tl

LARGEST_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-0x8000000000000000)


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


# Rows' parameters and results are parts of packed copies: kernels are compiled once for all alignments.
@triton.jit(do_not_specialize_on_alignment=["rows"])
def draw_kernel(logits, best, rows, parts, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_TOP: tl.constexpr):
    """The best scored ids of each chunk by score plus noise; grid (rows, chunks). ``rows`` [R, 3]: keys, temperature.

    The scores of a row whose ``best`` logit is not finite are minus infinity.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest = tl.load(best + row)
    first_key = tl.load(rows + row * 3).to(tl.uint32, bitcast=True)
    second_key = tl.load(rows + row * 3 + 1).to(tl.uint32, bitcast=True)
    temperature = tl.load(rows + row * 3 + 2).to(tl.float32, bitcast=True)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * row_stride + ids, mask=ids < VOCAB, other=float("-inf"))
    if temperature > 0.0:
        noise = gumbel(hash_u32(ids.to(tl.uint32), first_key, second_key))
        scores = tl.div_rn(scores - highest, tl.zeros_like(scores) + temperature) + noise
    scores = tl.where(tl.abs(highest) < float("inf"), scores, float("-inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # minus zero equals zero
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    scored = tl.where(ids < VOCAB, (rising << 32) | (ids ^ LARGEST_ID).to(tl.int64), NOTHING)
    _store_best(scored, parts + (row * tl.num_programs(1) + chunk) * NUM_TOP, NUM_TOP)


@triton.jit(do_not_specialize_on_alignment=["out"])
def merge_kernel(parts, out, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, NUM_TOP: tl.constexpr):
    """The best scored ids of a row among those of its chunks; grid (rows,)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scored = tl.load(parts + row * NUM_PARTS + i, mask=i < NUM_PARTS, other=NOTHING)
    _store_best(scored, out + row * NUM_TOP, NUM_TOP)
