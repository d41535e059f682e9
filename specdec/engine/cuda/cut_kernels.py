"""Top-k, top-p and min-p in Triton without sorting: the kept tokens are found digit by digit, by sums of integers.

Scores are at most 0, so a score's bits without its sign, its *rank*, rise as the score falls. A search finds the least
rank up to which tokens reach a goal: their number for top-k, their weight for top-p. Each of its eight steps sums the
tokens that match the bits found so far, by chunk and by their next four bits; the next step adds up the chunks and
picks the digit. Sums of integers have the same bits in any order, and weights are those of
``logit_processors.integer_weights``.
"""

import triton
import triton.language as tl

NO_LIMIT = tl.constexpr(0x7FFFFFFFFFFFFFFF)
ALL_RANKS = tl.constexpr(0xFFFFFFFF)
CUT_WORDS = tl.constexpr(5)
STATE_WORDS = tl.constexpr(4)
DIGITS = tl.constexpr(16)


# Rows' parameters are a part of a packed copy: kernels are compiled once for all alignments.
@triton.jit(do_not_specialize_on_alignment=["cuts"])
def scale_kernel(
    logits,
    cuts,
    part_peak,
    scores,
    row_stride,
    VOCAB: tl.constexpr,
    NUM_PEAKS: tl.constexpr,
    BLOCK_PEAKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(logit - best) / temperature; a row is NaN throughout if its best logit is not finite, and unchanged at
    temperature 0. Grid (rows, chunks). ``cuts`` [R, 5]: temperature, top-k, two words of top-p, least score."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK_PEAKS)
    best = tl.max(tl.load(part_peak + row * NUM_PEAKS + c, mask=c < NUM_PEAKS, other=float("-inf")), 0)
    temperature = tl.load(cuts + row * CUT_WORDS).to(tl.float32, bitcast=True)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < VOCAB, other=0.0)
    if temperature > 0.0:
        is_finite = tl.abs(best) < float("inf")
        below = tl.where(is_finite, x, 0.0) - tl.where(is_finite, best, 0.0)
        x = tl.where(is_finite, tl.div_rn(below, tl.zeros_like(x) + temperature), float("nan"))
    tl.store(scores + row * VOCAB + ids, x, mask=ids < VOCAB)


@triton.jit
def _rank(score):
    return (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)


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


@triton.jit
def _limit(total, cuts, row):
    """Limit of the summed weight before a token, below which top-p keeps the token; at least 1, for the best token."""
    low = tl.load(cuts + row * CUT_WORDS + 2).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(cuts + row * CUT_WORDS + 3).to(tl.int64)
    top_p = ((high << 32) | low).to(tl.float64, bitcast=True)
    limit = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    return tl.where(top_p < 1.0, tl.maximum(limit, 1), NO_LIMIT)


@triton.jit
def _chosen(states, partials, cuts, row, shift, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """State after the step that summed by the digit at ``shift``: last rank that top-k keeps, rank so far, sum below
    that rank, goal; and the digit."""
    c, digits = tl.arange(0, BLOCK_CHUNKS)[:, None], tl.arange(0, DIGITS)
    at = (row * NUM_CHUNKS + c) * DIGITS + digits[None, :]
    totals = tl.sum(tl.load(partials + at, mask=c < NUM_CHUNKS, other=0), 0)
    kept = tl.load(states + row * STATE_WORDS)
    rank = tl.load(states + row * STATE_WORDS + 1)
    below = tl.load(states + row * STATE_WORDS + 2)
    goal = tl.load(states + row * STATE_WORDS + 3)
    goal = tl.where(goal == 0, _limit(tl.sum(totals, 0), cuts, row), goal)
    is_before = tl.cumsum(totals, 0) + below < goal
    digit = tl.minimum(tl.sum(is_before.to(tl.int64), 0), DIGITS - 1)
    below += tl.sum(tl.where(digits < digit, totals, 0), 0)
    return kept, rank | (digit << shift), below, goal, digit


@triton.jit(do_not_specialize=["shift"], do_not_specialize_on_alignment=["cuts"])
def search_kernel(
    scores,
    cuts,
    from_states,
    from_partials,
    to_states,
    to_partials,
    shift,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    IS_FIRST: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """One step of a search: sums by the four bits of the rank at ``shift``; grid (rows, chunks).

    Writes the sums to ``to_partials`` [R, chunks, 16], and the state before this step to ``to_states`` [R, 4];
    ``from_*`` are those of the step before. ``IS_FIRST``: the first step of a search. ``FOLLOWS``: the search follows
    that of top-k, whose rank is kept.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if IS_FIRST:
        rank, below = row * 0, row * 0
        kept = rank + ALL_RANKS
        if FOLLOWS:
            _, kept, _, _, _ = _chosen(from_states, from_partials, cuts, row, 0, NUM_CHUNKS, BLOCK_CHUNKS)
        goal = row * 0
        if not BY_WEIGHT:
            goal = tl.load(cuts + row * CUT_WORDS + 1).to(tl.int64)
    else:
        kept, rank, below, goal, _ = _chosen(from_states, from_partials, cuts, row, shift + 4, NUM_CHUNKS, BLOCK_CHUNKS)
    if chunk == 0:
        tl.store(to_states + row * STATE_WORDS, kept)
        tl.store(to_states + row * STATE_WORDS + 1, rank)
        tl.store(to_states + row * STATE_WORDS + 2, below)
        tl.store(to_states + row * STATE_WORDS + 3, goal)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * VOCAB + ids, mask=ids < VOCAB, other=0.0)
    ranks = _rank(score)
    is_here = (ids < VOCAB) & ((ranks >> (shift + 4)) == (rank >> (shift + 4)))
    if BY_WEIGHT:
        each = tl.where(is_here & (ranks <= kept), _weight(score), 0)
    else:
        each = is_here.to(tl.int64)
    digit = (ranks >> shift) & 15
    to = to_partials + (row * NUM_CHUNKS + chunk) * DIGITS
    for d in tl.static_range(DIGITS):
        tl.store(to + d, tl.sum(tl.where(digit == d, each, 0), 0))


@triton.jit(do_not_specialize_on_alignment=["cuts"])
def cut_kernel(
    scores,
    cuts,
    states,
    partials,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
):
    """Set the scores of cut tokens to minus infinity, in place; grid (rows, chunks). ``states`` and ``partials`` are
    those of the last step."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_cut = tl.load(cuts + row * CUT_WORDS).to(tl.float32, bitcast=True) > 0.0
    least = tl.load(cuts + row * CUT_WORDS + 4).to(tl.float32, bitcast=True)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * VOCAB + ids, mask=ids < VOCAB, other=0.0)
    stays = score >= least
    if HAS_TOP_P:
        ranks = _rank(score)
        kept, rank, below, goal, digit = _chosen(states, partials, cuts, row, 0, NUM_CHUNKS, BLOCK_CHUNKS)
        # Tokens of one rank have equal weights; the lowest ids are kept.
        c = tl.arange(0, BLOCK_CHUNKS)
        at = (row * NUM_CHUNKS + c) * DIGITS + digit
        before = below + tl.sum(tl.load(partials + at, mask=c < chunk, other=0), 0)
        tied = tl.where((ids < VOCAB) & (ranks == rank) & (ranks <= kept), _weight(score), 0)
        before = before + tl.cumsum(tied, 0) - tied
        stays = stays & (ranks <= kept) & ((ranks < rank) | ((ranks == rank) & (before < goal)))
    elif HAS_TOP_K:
        _, rank, _, _, _ = _chosen(states, partials, cuts, row, 0, NUM_CHUNKS, BLOCK_CHUNKS)
        stays = stays & (_rank(score) <= rank)
    stays = stays | (score != score) | (is_cut == 0)
    tl.store(scores + row * VOCAB + ids, tl.where(stays, score, float("-inf")), mask=ids < VOCAB)
