"""Attention over the paged cache by the kernels of ``attention_kernels.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, ForwardContext, cache_of
from specdec.engine.batch import Batch
from specdec.engine.cuda.attention_kernels import attention_kernel, fold_kernel, write_kv_kernel
from specdec.engine.cuda.launch import launch

SPLIT = 256
"""Positions per split, a multiple of every tile's length. At 2,000 positions, a row of a model with 8 KV heads has 64
programs, half of the 132 multiprocessors of an H100."""
MAX_HEAD_DIM = 256
"""Most elements of a head: wider ones do not fit into the registers and the shared memory of a multiprocessor."""
_TILE_ROWS = 16
_TILE_QUERIES = 32
_MOST_PART_ROWS = 128
"""Number of rows above which splits get no programs of their own, as rows fill the GPU; rows with paths still do."""
_MOST_PART_BYTES = 1 << 27
_MIN_DOT = 16


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles of rows that share a program; the rows of a tile belong to one sequence."""

    starts: torch.Tensor
    """[num_tiles + 1] int32, the first row of each tile; tiles at the end may be empty."""
    num_tiles: int
    num_splits: int
    """Number of splits that cover every row's positions."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Sizes of a kernel's tiles, which depend on the model and not on the batch."""

    rows_per_tile: int
    block_m: int
    block_n: int
    block_k: int
    block_v: int
    num_warps: int
    num_stages: int


def launch_shape(num_heads: int, geometry: LayerGeometry, dtype: torch.dtype) -> LaunchShape:
    """The tiles for a layer. A row's matrix products use the same instructions for any number of rows."""
    group = num_heads // geometry.num_kv_heads
    widest = max(geometry.key_dim, geometry.value_dim)
    is_wide_float = dtype == torch.float32 and widest > 64  # without matrix instructions products take more registers
    rows = max(1, min(_TILE_ROWS, _TILE_QUERIES // (2 if is_wide_float else 1) // group))
    block_n = 64 if widest <= 128 and dtype != torch.float32 else 32
    return LaunchShape(
        rows_per_tile=rows,
        block_m=max(_MIN_DOT, power_of_two(rows * group)),
        block_n=16 if is_wide_float else block_n,
        block_k=max(_MIN_DOT, power_of_two(geometry.key_dim)),
        block_v=max(_MIN_DOT, power_of_two(geometry.value_dim)),
        num_warps=4 if widest <= 64 else 8,
        num_stages=5,  # the block table's loads take some: two tiles of keys are held, one of them being loaded
    )


def plan_tiles(batch: Batch, rows_per_tile: int, block_size: int) -> TilePlan:
    """Cut the rows of each sequence into tiles, without waiting for the device. Cost: nine small kernels."""
    num_rows, device = batch.row_seq.shape[0], batch.row_seq.device
    num_tiles = min(num_rows, num_rows // rows_per_tile + batch.num_seqs)
    rows = torch.arange(num_rows, device=device, dtype=torch.int32)
    first = torch.searchsorted(batch.row_seq, batch.row_seq, out_int32=True)  # the first row of a row's sequence
    tile = ((rows - first) % rows_per_tile == 0).cumsum(0, dtype=torch.int32) - 1
    starts = torch.searchsorted(tile, torch.arange(num_tiles + 1, device=device, dtype=torch.int32), out_int32=True)
    num_positions = batch.block_tables.shape[1] * block_size  # tree nodes off the chain have blocks too
    return TilePlan(starts, num_tiles, max(1, -(-num_positions // SPLIT)))


def write_kv(layer: int, batch: Batch, cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store keys and values ``[T, num_kv_heads, dim]`` at the slots of their rows."""
    geometry = cache.geometries[layer]
    launch(
        write_kv_kernel,
        (key.shape[0], geometry.num_kv_heads),
        key,
        value,
        cache.keys[layer],
        cache.values[layer],
        batch.slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=geometry.num_kv_heads,
        KEY_DIM=geometry.key_dim,
        VALUE_DIM=geometry.value_dim,
        BLOCK_SIZE=cache.block_size,
        BLOCK_D=power_of_two(max(geometry.key_dim, geometry.value_dim)),
        options={"num_warps": 1},
        cached=(cache.keys[layer], cache.values[layer]),
    )


def attend(
    query: torch.Tensor, layer: int, batch: Batch, cache: KVCache, options: AttentionOptions, plan: TilePlan
) -> torch.Tensor:
    """Attention ``[T, num_heads, value_dim]`` of queries ``[T, num_heads, key_dim]`` whose keys are in the cache.

    ``plan`` must have ``launch_shape``'s rows per tile. The elements of a head must be contiguous. Row-invariant on one
    device: a row's bits depend on its tokens only. Cost: one kernel, or two for few rows of more than ``SPLIT``
    positions.
    """
    num_rows, num_heads, _ = query.shape
    geometry = cache.geometries[layer]
    shape = launch_shape(num_heads, geometry, cache.dtype)
    out = query.new_empty(num_rows, num_heads, geometry.value_dim)
    num_alone = num_rows if batch.path_slots.shape[0] else 0
    num_parts = num_rows * num_heads * plan.num_splits
    is_whole = (
        plan.num_splits == 1
        or (num_rows > _MOST_PART_ROWS and num_alone == 0)
        or num_parts * geometry.value_dim * 4 > _MOST_PART_BYTES
    )
    peaks = totals = parts = out
    if not is_whole:
        # Padded to 16 bytes: with another alignment of the second tensor, Triton would compile the kernels again.
        peaks, totals = torch.empty(2, -(-num_parts // 4) * 4, dtype=torch.float32, device=query.device).unbind(0)
        parts = torch.empty(num_parts, geometry.value_dim, dtype=torch.float32, device=query.device)
    sinks = out if options.sinks is None else options.sinks
    common: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "VALUE_DIM": geometry.value_dim,
        "BLOCK_V": shape.block_v,
        "SPLIT": SPLIT,
        "HAS_WINDOW": options.sliding_window is not None,
        "HAS_SINKS": options.sinks is not None,
    }
    window = options.sliding_window or 0
    launch(
        attention_kernel,
        (plan.num_tiles * (1 if is_whole else plan.num_splits) + num_alone, geometry.num_kv_heads),
        query,
        cache.keys[layer],
        cache.values[layer],
        sinks,
        out,
        peaks,
        totals,
        parts,
        plan.starts,
        batch.row_seq,
        batch.position_ids,
        batch.context_lens,
        batch.path_offsets,
        batch.path_slots,
        batch.block_tables,
        batch.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        plan.num_tiles,
        plan.num_splits,
        window,
        options.scaling,
        options.softcap or 1.0,
        NUM_KV_HEADS=geometry.num_kv_heads,
        KEY_DIM=geometry.key_dim,
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        HAS_SOFTCAP=options.softcap is not None,
        WHOLE=is_whole,
        PRECISION="ieee",
        options={
            "num_warps": shape.num_warps,
            "num_stages": shape.num_stages,
            "enable_fp_fusion": False,
            "maxnreg": 255,  # else ptxas limits programs to 168 registers and spills, for an occupancy not reached
        },
        cached=(cache.keys[layer], cache.values[layer]),
        **common,
    )
    if not is_whole:
        launch(
            fold_kernel,
            (num_rows, num_heads),
            sinks,
            out,
            peaks,
            totals,
            parts,
            batch.position_ids,
            plan.num_splits,
            window,
            options={"num_warps": 1, "enable_fp_fusion": False},
            **common,
        )
    return out


class TritonAttention:
    """``AttentionKernel`` for models that transformers runs; it computes in float32. Row-invariant on one device.

    Cost: two or three kernels per layer, and ``plan_tiles`` once per pass. Raises ``ValueError`` for heads wider than
    ``MAX_HEAD_DIM`` on a GPU.
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
        geometry = cache.geometries[layer]
        if query.is_cuda and max(geometry.key_dim, geometry.value_dim) > MAX_HEAD_DIM:
            raise ValueError(f"heads of {geometry.key_dim} and {geometry.value_dim} are wider than {MAX_HEAD_DIM}")
        query, key, value = (data if data.stride(2) == 1 else data.contiguous() for data in (query, key, value))
        write_kv(layer, batch, cache, key, value)
        rows_per_tile = launch_shape(query.shape[1], geometry, cache.dtype).rows_per_tile
        plan: TilePlan | None = context.scratch.get(f"tiles of {rows_per_tile}")
        if plan is None:
            plan = plan_tiles(batch, rows_per_tile, cache.block_size)
            context.scratch[f"tiles of {rows_per_tile}"] = plan
        return attend(query, layer, batch, cache, options, plan)


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
