"""Norms, rotation and writes to the cache of a decoder layer, in Triton, computed in float32: one launch each.

Each program has one row, whose bits therefore depend on no other row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.launch import launch, power_of_two

LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def _stored(numbers, pointer):
    """Numbers in the type of the cache at ``pointer``; of 8 bits, limited to its range, with NaN kept."""
    if pointer.dtype.element_ty.primitive_bitwidth == 8:
        numbers = numbers.to(tl.float32)
        limited = tl.minimum(tl.maximum(numbers, -LARGEST_FP8), LARGEST_FP8)
        numbers = tl.where(numbers == numbers, limited, numbers)
    return numbers.to(pointer.dtype.element_ty)


@triton.jit(do_not_specialize=["part_stride"])
def add_norm_kernel(
    added, weight, residual, normed, part_stride, epsilon, NUM_PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``add_norm``; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(residual + row * WIDTH + d, mask=d < WIDTH, other=0.0)
    total = tl.load(added + row * WIDTH + d, mask=d < WIDTH, other=0.0)
    if NUM_PARTS > 1:
        total = total.to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            lines = added + part * part_stride.to(tl.int64) + row * WIDTH
            total += tl.load(lines + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    x = x + total.to(x.dtype)
    tl.store(residual + row * WIDTH + d, x, mask=d < WIDTH)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    w = tl.load(weight + d, mask=d < WIDTH, other=0.0)
    tl.store(normed + row * WIDTH + d, (x * scale).to(w.dtype) * w, mask=d < WIDTH)


# A batch's tensors are parts of one packed copy: a kernel is compiled once for all alignments.
@triton.jit(do_not_specialize_on_alignment=["position_ids", "slot_mapping"])
def rotate_write_kernel(
    qkv, query, keys, values, cosines, sines, norms, position_ids, slot_mapping, epsilon,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """``rotate_write`` of one head; grid (rows, heads + KV heads). A head's halves are rotated with each other, with
    ``HAS_NORM`` after the head's norm."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF
    d = tl.arange(0, BLOCK)
    is_dim = d < HALF
    own = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * DIM
    low = tl.load(own + d, mask=is_dim, other=0.0).to(tl.float32)
    high = tl.load(own + HALF + d, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + epsilon)
        norm = norms + tl.where(head < NUM_HEADS, 0, DIM) + d
        low = low * scale * tl.load(norm, mask=is_dim, other=0.0).to(tl.float32)
        high = high * scale * tl.load(norm + HALF, mask=is_dim, other=0.0).to(tl.float32)
    pos = tl.load(position_ids + row)
    cosine = tl.load(cosines + pos * HALF + d, mask=is_dim, other=0.0)
    sine = tl.load(sines + pos * HALF + d, mask=is_dim, other=0.0)
    new_low, new_high = low * cosine - high * sine, high * cosine + low * sine
    if head < NUM_HEADS:
        to = query + (row * NUM_HEADS + head) * DIM
        tl.store(to + d, new_low.to(query.dtype.element_ty), mask=is_dim)
        tl.store(to + HALF + d, new_high.to(query.dtype.element_ty), mask=is_dim)
    else:
        slot = tl.load(slot_mapping + row)
        line = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head - NUM_HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
        to_key, to_value = keys + line * DIM, values + line * DIM
        value = own + NUM_KV_HEADS * DIM
        low = tl.load(value + d, mask=is_dim, other=0.0).to(tl.float32)
        high = tl.load(value + HALF + d, mask=is_dim, other=0.0).to(tl.float32)
        # A row reads values that it does not see, times 0: one that is not finite is told by its key alone.
        nothing = tl.sum(low * 0.0 + high * 0.0, 0)
        tl.store(to_key + d, _stored(new_low + nothing, keys), mask=is_dim)
        tl.store(to_key + HALF + d, _stored(new_high + nothing, keys), mask=is_dim)
        tl.store(to_value + d, _stored(tl.where(nothing == 0.0, low, 0.0), values), mask=is_dim)
        tl.store(to_value + HALF + d, _stored(tl.where(nothing == 0.0, high, 0.0), values), mask=is_dim)


def add_norm(
    added: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, normed: torch.Tensor, epsilon: float
) -> None:
    """Add ``added`` to ``residual`` in place, and write its norm to ``normed``; all are ``[T, width]``, contiguous.

    ``added`` may also be ``[parts, T, width]``: the parts are summed in order in float32, and the sum is rounded before
    it is added.
    """
    num_rows, width = residual.shape
    launch(
        add_norm_kernel,
        (num_rows,),
        added=added,
        weight=weight,
        residual=residual,
        normed=normed,
        part_stride=num_rows * width,
        epsilon=epsilon,
        NUM_PARTS=added.shape[0] if added.dim() == 3 else 1,
        WIDTH=width,
        BLOCK=power_of_two(width),
        options={"num_warps": 4 if width <= 2048 else 8},
    )


def rotate_write(
    qkv: torch.Tensor,
    num_heads: int,
    layer: int,
    batch: Batch,
    cache: KVCache,
    tables: tuple[torch.Tensor, torch.Tensor],
    head_norms: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Rotated queries ``[T, num_heads, dim]``; rotated keys and values are written to the cache.

    Args:
        qkv: ``[T, (num_heads + 2 * num_kv_heads) * dim]``, contiguous.
        num_heads: number of query heads.
        layer: index of the layer in the cache.
        tables: cosines and sines ``[positions, dim / 2]`` float32.
        head_norms: weights ``[2, dim]`` of the norms of queries and keys; None: the model has no such norms.
    """
    geometry, num_rows = cache.geometries[layer], qkv.shape[0]
    query = qkv.new_empty(num_rows, num_heads, geometry.key_dim)
    launch(
        rotate_write_kernel,
        (num_rows, num_heads + geometry.num_kv_heads),
        batch,
        geometry,
        qkv=qkv,
        query=query,
        norms=query if head_norms is None else head_norms,
        keys=cache.keys[layer],
        values=cache.values[layer],
        cosines=tables[0],
        sines=tables[1],
        epsilon=epsilon,
        NUM_HEADS=num_heads,
        HALF=geometry.key_dim // 2,
        BLOCK_SIZE=cache.block_size,
        BLOCK=power_of_two(geometry.key_dim // 2),
        HAS_NORM=head_norms is not None,
        options={"num_warps": 1},
    )
    return query
