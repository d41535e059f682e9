"""Bias, penalties, min_tokens and allowed tokens in Triton: ``logit_processors.adjusted_logits`` to the bit."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _saturated(x, values):
    """Adjusted logits ``x``, clamped to finite numbers where the original ``values`` were finite."""
    bounded = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return tl.where(tl.abs(values) < float("inf"), bounded, values)


@triton.jit(do_not_specialize=["number"])
def adjust_kernel(
    logits, penalties, counts, held, biases, adjusted, row_stride, number, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Logits adjusted at draw ``number``; grid (rows, chunks). ``penalties`` [R, 3]: repetition, presence, frequency.

    By row and token: ``counts``, 1 and the number in the output for a token of the prompt or the output, else 0;
    ``held``, the number of draws for which it is held back; ``biases``.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    is_id, at = ids < VOCAB, row * VOCAB + ids
    x = tl.load(logits + row * row_stride + ids, mask=is_id, other=0.0)
    bias = tl.load(biases + at, mask=is_id, other=0.0)
    x = tl.where(bias != 0.0, _saturated(x + bias, x), x)
    count = tl.load(counts + at, mask=is_id, other=0)
    repetition = tl.zeros_like(x) + tl.load(penalties + row * 3)
    penalized = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
    penalized = penalized - tl.load(penalties + row * 3 + 1) * tl.where(count > 1, 1.0, 0.0)
    penalized = penalized - tl.load(penalties + row * 3 + 2) * (count - 1).to(tl.float32)
    x = tl.where(count > 0, _saturated(penalized, x), x)
    is_out = tl.load(held + at, mask=is_id, other=0) > number
    x = tl.where(is_out & (x < float("inf")), float("-inf"), x)
    tl.store(adjusted + row * VOCAB + ids, x, mask=is_id)
