"""Linear layers on a GPU: row-invariant ones, and ones with weights of 8 bits.

A row-invariant output is one sum over the inputs in rising order, for any number of rows: no sum is split between
programs, and a row of a matrix instruction depends on no other row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec.engine.cuda.launch import launch

_TILE_ROWS = 64
"""Rows of a tile, also in small steps: on Hopper smaller tiles take an instruction that sums differently."""


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows, weight, bias, out, num_rows, NUM_INPUTS: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """``ordered_linear``; grid (tiles of rows, tiles of outputs), so that concurrent programs read the same weights."""
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


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Sizes of a program's tiles. ``block_k`` depends on the dtype alone; the other sizes change no bit."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def product_tiles(num_rows: int, num_outputs: int, dtype: torch.dtype) -> ProductTiles:
    """Tiles for a product: narrow ones for few rows, so that all multiprocessors read weights."""
    if dtype == torch.float32:
        return ProductTiles(16, 32, 32, num_warps=4, num_stages=2)
    if num_rows > _TILE_ROWS:
        return ProductTiles(_TILE_ROWS, 128, 64, num_warps=4, num_stages=3)
    # About one program per multiprocessor, with 28 KiB of weights in flight or more; 4 TB/s need 25 KiB each.
    return ProductTiles(_TILE_ROWS, 32 if num_outputs <= 1 << 13 else 64, 64, num_warps=4, num_stages=7)


def ordered_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tiles: ProductTiles | None = None
) -> torch.Tensor:
    """``rows`` ``[T, K]`` times ``weight`` ``[N, K]``, plus ``bias`` ``[N]``: ``[T, N]`` in the dtype of ``rows``.

    Each output is a float32 sum in rising order of K, rounded once: on one kind of device a row has the same bits for
    any T. All tensors must be contiguous and of one dtype. ``tiles``: None: those of ``product_tiles``.
    """
    num_rows, num_inputs = rows.shape
    num_outputs = weight.shape[0]
    out = rows.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return out
    tiles = tiles or product_tiles(num_rows, num_outputs, rows.dtype)
    launch(
        product_kernel,
        (-(-num_rows // tiles.block_m), -(-num_outputs // tiles.block_n)),
        tiles,
        rows=rows,
        weight=weight,
        bias=weight if bias is None else bias,
        out=out,
        num_rows=num_rows,
        NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs,
        HAS_BIAS=bias is not None,
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": False},
    )
    return out


def fp8_linear(
    rows: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``rows`` ``[T, K]`` times a weight of 8 bits, plus ``bias``: ``[T, N]`` in the dtype of ``rows``.

    The weight is ``numbers`` ``[N, K]`` times ``scales`` ``[1, N]`` float32 (`Fp8Weight`). The rows are rounded to 8
    bits, with a scale each. Cost: two launches.
    """
    num_rows, num_inputs = rows.shape
    if num_rows == 0:  # a part of a prompt needs no logits, and torch takes an empty product only with a single scale
        return rows.new_empty(0, numbers.shape[0])
    rounded = torch.empty(num_rows, num_inputs, dtype=numbers.dtype, device=rows.device)
    of_rows = torch.empty(num_rows, 1, dtype=torch.float32, device=rows.device)
    launch(
        round_rows_kernel,
        (num_rows,),
        rows=rows.contiguous(),
        rounded=rounded,
        scales=of_rows,
        NUM_INPUTS=num_inputs,
        MOST=torch.finfo(numbers.dtype).max,
        BLOCK=1024,
        options={},
    )
    return torch._scaled_mm(rounded, numbers.t(), scale_a=of_rows, scale_b=scales, bias=bias, out_dtype=rows.dtype)
