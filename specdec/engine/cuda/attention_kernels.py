"""Paged attention in Triton: ragged batches of prefill chunks, decodes and trees.

What a row computes, and in which order, follows from its own positions alone. Positions are taken in tiles of
``BLOCK_N`` and in splits of ``SPLIT``, both counted from position 0; each split starts anew and is folded into the
row's result, in order, whether by the same program or by another kernel. Rows that share a program share what is
loaded and nothing else: a row of a matrix product depends on no other row. No kernel may contract multiplications with
additions (``enable_fp_fusion``): the two ways to fold would round differently.
"""

import triton
import triton.language as tl

NO_LIMIT = tl.constexpr(2147483647)
# Parts of one packed copy, and sizes of a batch: a kernel is compiled once, whatever they are.
_OF_BATCH = [
    "slot_mapping", "tile_starts", "row_seq", "positions", "context_lens", "path_offsets", "path_slots", "block_tables"
]  # fmt: skip
_SIZES = ["table_stride", "num_splits", "window"]


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kv_kernel(
    key,
    value,
    keys,
    values,
    slot_mapping,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store one row's key and value of one head; grid (rows, KV heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + row)
    line = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    d = tl.arange(0, BLOCK_D)
    new_key = tl.load(key + row * key_row_stride + head * key_head_stride + d, mask=d < KEY_DIM)
    tl.store(keys + line * KEY_DIM + d, new_key.to(keys.dtype.element_ty), mask=d < KEY_DIM)
    new_value = tl.load(value + row * value_row_stride + head * value_head_stride + d, mask=d < VALUE_DIM)
    tl.store(values + line * VALUE_DIM + d, new_value.to(values.dtype.element_ty), mask=d < VALUE_DIM)


@triton.jit
def _fold(peak, total, out, split_peak, split_total, split_out):
    """The result of all splits up to one, from that of the splits before it; an empty split changes no bit."""
    new_peak = tl.maximum(peak, split_peak)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    before, here = tl.exp(peak - safe), tl.exp(split_peak - safe)
    is_empty = split_peak == float("-inf")
    total = tl.where(is_empty, total, total * before + split_total * here)
    out = tl.where(is_empty[:, None], out, out * before[:, None] + split_out * here[:, None])
    return new_peak, total, out


@triton.jit
def _scores(products, n, pos, first, scaling, softcap, HAS_SOFTCAP: tl.constexpr):
    """Masked scores of positions ``n`` [N] for rows at ``pos`` [M]."""
    scores = products * scaling
    if HAS_SOFTCAP:
        # tanh by an exponential that never overflows.
        size = tl.abs(scores) / softcap
        decay = tl.exp(-2.0 * size)
        tanh = (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -tanh, tanh) * softcap
    is_visible = (n[None, :] <= pos[:, None]) & (n[None, :] >= first[:, None])
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def _weights(scores, peak, total):
    """Weights [M, N] of one tile, the factor for what came before it, the new peak and total."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp(scores - safe[:, None])
    before = tl.exp(peak - safe)
    return weights, before, new_peak, total * before + tl.sum(weights, 1)


@triton.jit
def _lines(slots, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Which line of the cache, seen as [block * kv head * slot, dim], holds a physical slot of one head."""
    return ((slots // BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slots % BLOCK_SIZE


@triton.jit
def _slots_of_row(
    n, row, seq, last, context_lens, path_offsets, path_slots, block_tables, table_stride, BLOCK_SIZE: tl.constexpr
):
    """Physical slots of positions ``n`` as one row reads them: by its block table, then by its path."""
    context = tl.load(context_lens + row)
    path = tl.load(path_offsets + row)
    by_table, by_path = (n < context) & (n <= last), (n >= context) & (n <= last)
    block = tl.load(block_tables + seq * table_stride + n // BLOCK_SIZE, mask=by_table, other=0).to(tl.int64)
    on_path = tl.load(path_slots + path + n - context, mask=by_path, other=0).to(tl.int64)
    return tl.where(by_path, on_path, block * BLOCK_SIZE + n % BLOCK_SIZE)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_OF_BATCH)
def attention_kernel(
    query,
    keys,
    values,
    sinks,
    out,
    part_peak,
    part_total,
    part_out,
    tile_starts,
    row_seq,
    positions,
    context_lens,
    path_offsets,
    path_slots,
    block_tables,
    table_stride,
    query_row_stride,
    query_head_stride,
    num_splits,
    window,
    scaling,
    softcap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows ``tile_starts[i] .. tile_starts[i + 1]``, which are of one sequence, for one KV head.

    Grid (tiles, KV heads, 1) with ``WHOLE``, which writes ``out``; else (tiles, KV heads, splits), which writes the
    parts for ``fold_kernel``.
    """
    tile, kv_head, split_index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(tile_starts + tile), tl.load(tile_starts + tile + 1)
    if start >= end:
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m = tl.arange(0, BLOCK_M)
    row, head = start + m // GROUP, kv_head * GROUP + m % GROUP
    is_row = row < end
    pos = tl.load(positions + row, mask=is_row, other=-1).to(tl.int32)
    context = tl.load(context_lens + row, mask=is_row, other=0)
    first = tl.maximum(pos - window + 1, 0) if HAS_WINDOW else tl.zeros_like(pos)
    lowest = tl.min(tl.where(is_row, first, NO_LIMIT), 0)
    last = tl.max(pos, 0)
    shared_end = tl.min(tl.where(is_row & (context <= pos), context, NO_LIMIT), 0)  # below it all read the same slots
    seq = tl.load(row_seq + start).to(tl.int64)

    if WHOLE:
        split_low, split_high = lowest // SPLIT, last // SPLIT + 1
    else:
        split_low, split_high = split_index, split_index + 1
        if (split_index * SPLIT > last) | ((split_index + 1) * SPLIT <= lowest):
            return

    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    query_lines = query + row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query_lines[:, None] + k[None, :], mask=is_row[:, None] & (k[None, :] < KEY_DIM), other=0.0)
    q = q.to(keys.dtype.element_ty)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        total += 1.0
    result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for split in range(split_low, split_high):
        split_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_total = tl.zeros([BLOCK_M], tl.float32)
        split_out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        low = tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
        for tile_low in range(low, tl.minimum((split + 1) * SPLIT, last + 1), BLOCK_N):
            n = tile_low + tl.arange(0, BLOCK_N)
            if tile_low + BLOCK_N <= shared_end:
                is_read = n <= last
                block = tl.load(block_tables + seq * table_stride + n // BLOCK_SIZE, mask=is_read, other=0)
                slots = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
                lines = _lines(slots, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
                key_mask = is_read[None, :] & (k[:, None] < KEY_DIM)
                key_tile = tl.load(keys + lines[None, :] * KEY_DIM + k[:, None], mask=key_mask, other=0.0)
                products = tl.dot(q, key_tile, input_precision=PRECISION)
                scores = _scores(products, n, pos, first, scaling, softcap, HAS_SOFTCAP)
                weights, before, split_peak, split_total = _weights(scores, split_peak, split_total)
                value_mask = is_read[:, None] & (v[None, :] < VALUE_DIM)
                value_tile = tl.load(values + lines[:, None] * VALUE_DIM + v[None, :], mask=value_mask, other=0.0)
                split_out = split_out * before[:, None]
                split_out = tl.dot(weights.to(value_tile.dtype), value_tile, acc=split_out, input_precision=PRECISION)
            else:  # around the end of the shared tokens each row has positions of its own: row by row, the same sums
                products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for r in tl.range(start, end, num_stages=1):
                    own_last = tl.load(positions + r).to(tl.int32)
                    slots = _slots_of_row(
                        n,
                        r,
                        seq,
                        own_last,
                        context_lens,
                        path_offsets,
                        path_slots,
                        block_tables,
                        table_stride,
                        BLOCK_SIZE,
                    )
                    lines = _lines(slots, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
                    key_mask = (n <= own_last)[None, :] & (k[:, None] < KEY_DIM)
                    key_tile = tl.load(keys + lines[None, :] * KEY_DIM + k[:, None], mask=key_mask, other=0.0)
                    of_row = tl.dot(q, key_tile, input_precision=PRECISION)
                    products = tl.where((row == r)[:, None], of_row, products)
                scores = _scores(products, n, pos, first, scaling, softcap, HAS_SOFTCAP)
                weights, before, split_peak, split_total = _weights(scores, split_peak, split_total)
                split_out = split_out * before[:, None]
                for r in tl.range(start, end, num_stages=1):
                    own_last = tl.load(positions + r).to(tl.int32)
                    slots = _slots_of_row(
                        n,
                        r,
                        seq,
                        own_last,
                        context_lens,
                        path_offsets,
                        path_slots,
                        block_tables,
                        table_stride,
                        BLOCK_SIZE,
                    )
                    lines = _lines(slots, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
                    value_mask = (n <= own_last)[:, None] & (v[None, :] < VALUE_DIM)
                    value_tile = tl.load(values + lines[:, None] * VALUE_DIM + v[None, :], mask=value_mask, other=0.0)
                    with_row = tl.dot(
                        weights.to(value_tile.dtype), value_tile, acc=split_out, input_precision=PRECISION
                    )
                    split_out = tl.where((row == r)[:, None], with_row, split_out)
        if WHOLE:
            peak, total, result = _fold(peak, total, result, split_peak, split_total, split_out)
        else:
            peak, total, result = split_peak, split_total, split_out
    line = row.to(tl.int64) * NUM_HEADS + head
    mask = is_row[:, None] & (v[None, :] < VALUE_DIM)
    if WHOLE:
        result = result / total[:, None]
        tl.store(out + line[:, None] * VALUE_DIM + v[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        part = line * num_splits + split_index
        tl.store(part_peak + part, peak, mask=is_row)
        tl.store(part_total + part, total, mask=is_row)
        tl.store(part_out + part[:, None] * VALUE_DIM + v[None, :], result, mask=mask)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_OF_BATCH)
def fold_kernel(
    sinks,
    out,
    part_peak,
    part_total,
    part_out,
    positions,
    num_splits,
    window,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Fold the splits of one row and head, as ``attention_kernel`` does with ``WHOLE``; grid (rows, heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pos = tl.load(positions + row).to(tl.int32)
    first = tl.maximum(pos - window + 1, 0) if HAS_WINDOW else 0
    v = tl.arange(0, BLOCK_V)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32)
        total += 1.0
    result = tl.zeros([1, BLOCK_V], tl.float32)
    line = row * NUM_HEADS + head
    for split in range(first // SPLIT, pos // SPLIT + 1):
        part = line * num_splits + split
        split_peak = tl.load(part_peak + part + tl.arange(0, 1))
        split_total = tl.load(part_total + part + tl.arange(0, 1))
        split_out = tl.load(part_out + part * VALUE_DIM + v, mask=v < VALUE_DIM, other=0.0)[None, :]
        peak, total, result = _fold(peak, total, result, split_peak, split_total, split_out)
    result = result / total[:, None]
    tl.store(out + line * VALUE_DIM + v[None, :], result.to(out.dtype.element_ty), mask=v[None, :] < VALUE_DIM)
