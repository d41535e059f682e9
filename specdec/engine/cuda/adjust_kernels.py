"""Bias, penalties, min_tokens and allowed tokens in Triton: ``logit_processors.adjusted_logits`` to the bit.

Each row has a *mark* for each token, an int32: four flag bits, and above them the token's count in the output. A row's
marks lie side by side, so that one store counts the last drawn token.
"""

import triton
import triton.language as tl

SEEN = tl.constexpr(1)
"""Flag of a token in the prompt or the output."""
HELD = tl.constexpr(2)
"""Flag of a token that min_tokens holds back."""
ALLOWED = tl.constexpr(4)
BIASED = tl.constexpr(8)
ONCE = tl.constexpr(16)
"""Unit of the count: its lowest bit."""
ADJUST_WORDS = tl.constexpr(6)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["entries"])
def mark_kernel(entries, marks, biases, num_entries, BLOCK: tl.constexpr):
    """Add marks to zeroed ones, and set biases; grid (chunks of entries,). ``entries`` [3, num_entries]: indices into
    all rows' marks, marks, biases as bits. An index may occur several times, with different bits and at most one
    bias."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_one = i < num_entries
    place = tl.load(entries + i, mask=is_one, other=0)
    mark = tl.load(entries + num_entries + i, mask=is_one, other=0)
    bias = tl.load(entries + 2 * num_entries + i, mask=is_one, other=0).to(tl.float32, bitcast=True)
    tl.atomic_add(marks + place, mark, mask=is_one)
    tl.store(biases + place, bias, mask=is_one & ((mark & BIASED) != 0))


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["drawn"])
def count_kernel(drawn, marks, num_top, VOCAB: tl.constexpr):
    """Count each row's first token of ``drawn`` [rows, 2, num_top] as output; grid (rows,)."""
    r = tl.program_id(0).to(tl.int64)
    place = marks + r * VOCAB + tl.load(drawn + r * 2 * num_top)
    tl.store(place, (tl.load(place) | SEEN) + ONCE)


@triton.jit
def _saturated(x, values):
    """Adjusted logits ``x``, clamped to finite numbers where the original ``values`` were finite."""
    bounded = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return tl.where(tl.abs(values) < float("inf"), bounded, values)


@triton.jit(do_not_specialize=["number"])
def adjust_kernel(logits, rows, marks, biases, adjusted, row_stride, number, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Logits adjusted by a row's parameters at draw ``number``; grid (rows, chunks). ``rows`` [R, 6]: repetition,
    presence and frequency penalty as bits, whether there are penalties, number of draws for which tokens are held back,
    whether only allowed tokens may be drawn."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    is_id = ids < VOCAB
    word = rows + row * ADJUST_WORDS
    x = tl.load(logits + row * row_stride + ids, mask=is_id, other=0.0)
    mark = tl.load(marks + row * VOCAB + ids, mask=is_id, other=0)
    is_biased = (mark & BIASED) != 0
    bias = tl.load(biases + row * VOCAB + ids, mask=is_id & is_biased, other=0.0)
    x = tl.where(is_biased, _saturated(x + bias, x), x)
    if tl.load(word + 3) != 0:
        repetition = tl.zeros_like(x) + tl.load(word).to(tl.float32, bitcast=True)
        presence = tl.load(word + 1).to(tl.float32, bitcast=True)
        frequency = tl.load(word + 2).to(tl.float32, bitcast=True)
        count = mark // ONCE
        penalized = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
        penalized = penalized - presence * tl.where(count > 0, 1.0, 0.0)
        penalized = penalized - frequency * count.to(tl.float32)
        x = tl.where((mark & SEEN) != 0, _saturated(penalized, x), x)
    is_out = ((mark & HELD) != 0) & (tl.load(word + 4) > number)
    is_out |= ((mark & ALLOWED) == 0) & (tl.load(word + 5) != 0)
    x = tl.where(is_out & (x < float("inf")), float("-inf"), x)
    tl.store(adjusted + row * VOCAB + ids, x, mask=is_id)
