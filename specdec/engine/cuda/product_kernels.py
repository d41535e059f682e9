"""Row-invariant matrix products in Triton.

An output is one sum over the inputs in rising order, for any number of rows: no sum is split between programs, and a
row of a matrix instruction depends on no other row. On Hopper, programs have 64 rows, of which few are used in small
steps: for fewer it takes another instruction, which sums differently.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,
    weight,
    bias,
    out,
    num_rows,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """``rows`` [T, inputs] times ``weight`` [outputs, inputs], plus ``bias``; grid (tiles of rows, tiles of outputs).

    Tiles of rows are the first dimension, so that concurrent programs read the same weights.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_output = row < num_rows, output < NUM_OUTPUTS
    row_lines = rows + row.to(tl.int64)[:, None] * NUM_INPUTS
    weight_lines = weight + output.to(tl.int64)[None, :] * NUM_INPUTS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for low in range(0, NUM_INPUTS, BLOCK_K):
        row_mask, weight_mask = is_row[:, None], is_output[None, :]
        if NUM_INPUTS % BLOCK_K != 0:
            row_mask = row_mask & (low + k < NUM_INPUTS)[None, :]
            weight_mask = weight_mask & (low + k < NUM_INPUTS)[:, None]
        row_tile = tl.load(row_lines + low + k[None, :], mask=row_mask, other=0.0)
        weight_tile = tl.load(weight_lines + low + k[:, None], mask=weight_mask, other=0.0)
        total = tl.dot(row_tile, weight_tile, acc=total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def round_rows_kernel(rows, rounded, scales, NUM_INPUTS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Round each row to numbers of 8 bits, at most ``MOST``, times a scale; grid (rows,). A row with NaN or infinity
    holds NaN."""
    row = tl.program_id(0).to(tl.int64)
    peaks = tl.zeros([BLOCK], tl.float32)
    for low in range(0, NUM_INPUTS, BLOCK):
        i = low + tl.arange(0, BLOCK)
        x = tl.load(rows + row * NUM_INPUTS + i, mask=i < NUM_INPUTS, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(x))
    scale = tl.maximum(tl.max(peaks, 0), 1e-30) / MOST
    tl.store(scales + row, scale)
    for low in range(0, NUM_INPUTS, BLOCK):
        i = low + tl.arange(0, BLOCK)
        x = tl.load(rows + row * NUM_INPUTS + i, mask=i < NUM_INPUTS, other=0.0).to(tl.float32)
        tl.store(rounded + row * NUM_INPUTS + i, (x / scale).to(tl.float8e4nv), mask=i < NUM_INPUTS)
