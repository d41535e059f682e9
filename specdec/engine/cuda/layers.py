"""A decoder layer's operations between its matrix products, by the kernels of ``layer_kernels.py``: one launch each."""

from __future__ import annotations

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.attention import power_of_two
from specdec.engine.cuda.launch import launch
from specdec.engine.cuda.layer_kernels import add_norm_kernel, gate_kernel, rotate_write_kernel

_GATE_BLOCK = 1024


def add_norm(
    added: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    normed: torch.Tensor,
    epsilon: float,
    input_ids: torch.Tensor | None = None,
) -> None:
    """Add ``added`` to ``residual`` in place, and write its norm to ``normed``; all are ``[T, width]``, contiguous.

    ``added`` may also be ``[parts, T, width]``: the parts are summed first, in order. With ``input_ids`` it is an
    embedding, whose rows replace ``residual``.
    """
    num_rows, width = residual.shape
    launch(
        add_norm_kernel,
        (num_rows,),
        added,
        residual if input_ids is None else input_ids,
        weight,
        residual,
        normed,
        num_rows * width,
        epsilon,
        NUM_PARTS=added.shape[0] if added.dim() == 3 else 1,
        WIDTH=width,
        NUM_EMBEDDINGS=0 if input_ids is None else added.shape[0],
        BLOCK=power_of_two(width),
        options={"num_warps": 4 if width <= 2048 else 8},
        cached=() if input_ids is None else (added,),
    )


def rotate_write(
    qkv: torch.Tensor,
    num_heads: int,
    layer: int,
    batch: Batch,
    cache: KVCache,
    tables: tuple[torch.Tensor, torch.Tensor],
    head_norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> torch.Tensor:
    """Rotated queries ``[T, num_heads, dim]``; rotated keys and values are written to the cache.

    Args:
        qkv: ``[T, (num_heads + 2 * num_kv_heads) * dim]``, contiguous.
        num_heads: number of query heads.
        layer: index of the layer.
        batch: positions and slots of the rows.
        cache: KV cache of the model.
        tables: cosines and sines ``[positions, dim / 2]`` float32.
        head_norms: weights ``[dim]`` of the norms of queries and keys; None: the model has no such norms.
        epsilon: epsilon of these norms.
    """
    geometry, num_rows = cache.geometries[layer], qkv.shape[0]
    query = qkv.new_empty(num_rows, num_heads, geometry.key_dim)
    query_norm, key_norm = head_norms or (query, query)
    launch(
        rotate_write_kernel,
        (num_rows, num_heads + geometry.num_kv_heads),
        qkv,
        query,
        cache.keys[layer],
        cache.values[layer],
        *tables,
        query_norm,
        key_norm,
        batch.position_ids,
        batch.slot_mapping,
        epsilon,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=geometry.num_kv_heads,
        HALF=geometry.key_dim // 2,
        BLOCK_SIZE=cache.block_size,
        BLOCK=power_of_two(geometry.key_dim // 2),
        HAS_NORM=head_norms is not None,
        options={"num_warps": 1},
        cached=(cache.keys[layer], cache.values[layer], *tables),
    )
    return query


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of rows ``[T, 2 * width]``, times the second half: ``[T, width]``."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    block = min(_GATE_BLOCK, power_of_two(width))
    grid = (num_rows, -(-width // block))
    launch(gate_kernel, grid, gate_up, out, WIDTH=width, BLOCK=block, options={"num_warps": 4})
    return out
