"""Attention over the paged cache by the kernels of ``attention_kernels.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, ForwardContext, cache_of
from specdec.engine.batch import Batch
from specdec.engine.cuda.attention_kernels import attention_kernel, fold_kernel, plan_kernel
from specdec.engine.cuda.launch import launch, power_of_two

SPLIT = 256
"""Positions per split, a multiple of every tile's length. At 2,000 positions, a row of a model with 8 KV heads has 64
entries of work, half of the 132 multiprocessors of an H100."""
_PREFILL_SPLIT = 2048
MOST_FINE_ROWS = 256
"""Rows above which a pass that is not row-invariant takes larger tiles and splits; captured steps have fewer."""
_QUERIES, _PREFILL_QUERIES = 16, 128
_PROGRAMS = 264
"""Programs of a launch, over all KV heads: two for each multiprocessor of an H100."""
_MOST_PART_BYTES = 1 << 27
_MIN_DOT = 16
_MOST_PATH = 256
"""Most positions of a path past the blocks of its sequence; a head's drafted tokens are there."""
_FOLDED_DIM = 64
_PLANNED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Sizes of a kernel's tiles."""

    rows_per_tile: int
    block_m: int
    block_n: int
    block_k: int
    block_v: int
    split: int
    num_warps: int
    num_stages: int


def launch_shape(
    num_heads: int, geometry: LayerGeometry, dtype: torch.dtype, num_rows: int = 1, *, row_invariant: bool = True
) -> LaunchShape:
    """The tiles for a layer. If ``row_invariant``, those for one row serve any number of rows."""
    group = num_heads // geometry.num_kv_heads
    widest = max(geometry.key_dim, geometry.value_dim)
    is_narrow = widest <= 128 and dtype != torch.float32
    is_large = is_narrow and num_rows > MOST_FINE_ROWS and not row_invariant
    rows = max(1, (_PREFILL_QUERIES if is_large else _QUERIES) // group)
    is_wide_float = dtype == torch.float32 and widest > 64  # without matrix instructions products take more registers
    return LaunchShape(
        rows_per_tile=rows,
        block_m=max(_MIN_DOT, power_of_two(rows * group)),
        block_n=64 if is_narrow and not is_large else 16 if is_wide_float else 32,
        block_k=max(_MIN_DOT, power_of_two(geometry.key_dim)),
        block_v=max(_MIN_DOT, power_of_two(geometry.value_dim)),
        split=_PREFILL_SPLIT if is_large else SPLIT,
        num_warps=8 if is_large or widest > 128 else 4,
        num_stages=5,  # the block table's loads take some: two tiles of keys are held, one of them being loaded
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What attention computes for some of a pass's rows: a list that the device has written (``plan_kernel``)."""

    entries: torch.Tensor
    """[1 + 3 * most] int32."""
    most: int
    """Most entries; the device knows their number."""
    first_row: int
    end_row: int
    num_splits: int
    """Number of splits that cover every row's positions."""
    window: int
    """Most positions that a row reads; 0: all."""


def plan_work(batch: Batch, shape: LaunchShape, block_size: int, window: int, bytes_per_split: int) -> list[Work]:
    """The work of a pass for layers of one shape and window (0: none), in parts of rows whose results fit into memory.

    ``bytes_per_split``: of one row's parts. Cost: two launches for each part, which wait for nothing.
    """
    num_rows, device = batch.row_seq.shape[0], batch.row_seq.device
    num_slots = batch.path_slots.shape[0]
    num_positions = batch.block_tables.shape[1] * block_size + min(num_slots, _MOST_PATH)
    num_splits = max(1, -(-num_positions // shape.split))
    rows_at_once = max(shape.rows_per_tile, _MOST_PART_BYTES // (num_splits * bytes_per_split))
    works = []
    for first_row in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - first_row)
        num_tiles = min(rows, rows // shape.rows_per_tile + batch.num_seqs)
        most = num_tiles * num_splits + (2 * rows + num_slots // shape.split if num_slots else 0)
        entries = torch.empty(1 + 3 * most, dtype=torch.int32, device=device)
        entries[:1].zero_()
        works.append(Work(entries, most, first_row, first_row + rows, num_splits, window))
        block_rows = power_of_two(shape.rows_per_tile)
        named: dict[str, Any] = {"BLOCK_ROWS": block_rows, "BLOCK": _PLANNED_AT_ONCE}
        launch(plan_kernel, (rows,), works[-1], batch, shape, options={"num_warps": 1}, **named)
    return works


def attend(
    query: torch.Tensor,
    layer: int,
    batch: Batch,
    cache: KVCache,
    options: AttentionOptions,
    plans: dict[str, Any],
    *,
    row_invariant: bool = False,
) -> torch.Tensor:
    """Attention ``[T, num_heads, value_dim]`` of rotated queries ``[T, num_heads, key_dim]``, whose keys are cached.

    The elements of a head must be contiguous. Row-invariant on one device up to ``MOST_FINE_ROWS`` rows, and if
    ``row_invariant`` for any number of rows: a row's bits depend on its tokens only. No program computes more than one
    split. Cost: two kernels, more for many rows of long contexts.

    ``plans``: empty at the beginning of a pass, then what its layers share. ``row_invariant``: whether large passes
    take the tiles of small ones.
    """
    num_rows, num_heads, _ = query.shape
    geometry, window = cache.geometries[layer], options.sliding_window or 0
    dtype = query.dtype if cache.dtype.itemsize == 1 else cache.dtype
    shape = launch_shape(num_heads, geometry, dtype, num_rows, row_invariant=row_invariant)
    bytes_per_split = num_heads * (geometry.value_dim + 2) * 4
    key = f"attention of {shape} with a window of {window} and {bytes_per_split} bytes"
    if key not in plans:
        plans[key] = plan_work(batch, shape, cache.block_size, window, bytes_per_split)
    out = query.new_empty(num_rows, num_heads, geometry.value_dim)
    block_v = min(shape.block_v, _FOLDED_DIM)
    sources = batch, shape, geometry, options
    for work in plans[key]:
        num_lines = (work.end_row - work.first_row) * num_heads
        num_parts = num_lines * work.num_splits
        # Padded to 16 bytes: with another alignment of the second tensor, Triton would compile the kernels again.
        peaks, totals = torch.empty(2, -(-num_parts // 4) * 4, dtype=torch.float32, device=query.device).unbind(0)
        parts = torch.empty(num_parts, geometry.value_dim, dtype=torch.float32, device=query.device)
        named = {"part_peak": peaks, "part_total": totals, "part_out": parts, "NUM_HEADS": num_heads}
        launch(
            attention_kernel,
            (max(1, min(work.most, _PROGRAMS // geometry.num_kv_heads)), geometry.num_kv_heads),
            work,
            *sources,
            query=query,
            query_row_stride=query.stride(0),
            query_head_stride=query.stride(1),
            keys=cache.keys[layer],
            values=cache.values[layer],
            table_stride=batch.block_tables.stride(0),
            softcap=options.softcap or 1.0,
            BLOCK_SIZE=cache.block_size,
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=options.softcap is not None,
            options={
                "num_warps": shape.num_warps,
                "num_stages": shape.num_stages,
                "maxnreg": 255,  # else ptxas limits programs to 168 registers and spills, for an occupancy not reached
            },
            **named,
        )
        launch(
            fold_kernel,
            (num_lines // num_heads, num_heads, -(-geometry.value_dim // block_v)),
            work,
            *sources,
            sinks=out if options.sinks is None else options.sinks,
            out=out,
            BLOCK_V=block_v,
            HAS_SINKS=options.sinks is not None,
            options={"num_warps": 1},
            **named,
        )
    return out


class TritonAttention:
    """``AttentionKernel`` for models that transformers runs; it computes in float32. Row-invariant as ``attend`` is.

    Cost: six kernels per layer, ``KVCache.write``, and ``plan_work`` once per pass.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        context: ForwardContext,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See ``AttentionKernel``."""
        cache, batch = cache_of(context), context.batch
        query = query if query.stride(2) == 1 else query.contiguous()
        nothing = (value * 0.0).sum(2, keepdim=True)  # as in `rotate_write_kernel`
        cache.write(layer, batch.slot_mapping, key + nothing, value.nan_to_num(0.0, 0.0, 0.0))
        return attend(query, layer, batch, cache, options, context.scratch)
