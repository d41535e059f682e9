"""Paged attention in Triton: ragged batches of prefill chunks, decodes and trees.

A row's operations and their order depend on its own positions alone. Positions are processed in tiles of ``BLOCK_N``
and in splits of ``SPLIT``, both counted from position 0. Each split starts from zero and is folded into the row's
result, in order, by the same program or by another kernel. Rows of one program share only loads: a row of a matrix
product depends on no other row. No kernel may fuse multiplications with additions (``enable_fp_fusion``): the two ways
to fold would round differently.

The loop over positions has no branch, so that loads run ahead of products. Rows of a branching tree have positions that
they do not share; a program for each such row computes them, in place of a branch.
"""

import triton
import triton.language as tl

NO_LIMIT = tl.constexpr(2147483647)
FOLDED_AT_ONCE = tl.constexpr(8)
# Parts of one packed copy, and sizes of a batch: a kernel is compiled once for all alignments and values of these.
_OF_BATCH = [
    "slot_mapping", "tile_starts", "row_seq", "positions", "context_lens", "path_offsets", "path_slots", "block_tables"
]  # fmt: skip
_SIZES = ["table_stride", "num_tiles", "num_splits", "window"]


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
    """Fold one split into the result of the splits before it; an empty split changes no bit."""
    new_peak = tl.maximum(peak, split_peak)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    before, here = tl.exp(peak - safe), tl.exp(split_peak - safe)
    is_empty = split_peak == float("-inf")
    total = tl.where(is_empty, total, total * before + split_total * here)
    out = tl.where(is_empty[:, None], out, out * before[:, None] + split_out * here[:, None])
    return new_peak, total, out


@triton.jit
def _scores(products, n, pos, first, scaling, softcap, HAS_SOFTCAP: tl.constexpr):
    """Masked scores [M, N] of positions ``n`` [N] for rows at ``pos`` [M] that see positions from ``first`` [M] on."""
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
    """Weights [M, N] of one tile, the factor [M] for the tiles before it, the new peak and total [M]."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp(scores - safe[:, None])
    before = tl.exp(peak - safe)
    return weights, before, new_peak, total * before + tl.sum(weights, 1)


@triton.jit
def _lines(slots, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Lines of physical slots of one head in the cache, seen as [block * kv head * slot, dim]."""
    return ((slots // BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slots % BLOCK_SIZE


@triton.jit
def _slots(n, last, context, path, table, path_slots, block_tables, BLOCK_SIZE: tl.constexpr):
    """Physical slots of positions ``n``: below ``context`` from the block table, from there on from the path."""
    by_table = n < context
    from_where = tl.where(by_table, block_tables + table + n // BLOCK_SIZE, path_slots + path + (n - context))
    found = tl.load(from_where, mask=n <= last, other=0).to(tl.int64)
    return tl.where(by_table, found * BLOCK_SIZE + n % BLOCK_SIZE, found)


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
    num_tiles,
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
    """Attention of a tile of rows, or of one row alone, for one KV head.

    Grid (tiles * splits + rows, KV heads), which writes parts for ``fold_kernel``; with ``WHOLE`` (tiles + rows, KV
    heads), which writes ``out``. Without paths in the batch there are no programs for rows. For a row with a path, its
    tile computes the splits that end before the path begins (with ``WHOLE`` none), and its own program the others.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
    num_shared = num_tiles if WHOLE else num_tiles * num_splits
    # Chosen without a branch: after a branch, Triton does not recognize contiguous loads.
    is_alone, alone = program >= num_shared, tl.maximum(program - num_shared, 0)
    tile, split_index = program % num_tiles, program // num_tiles
    start = tl.where(is_alone, alone, tl.load(tile_starts + tile))
    end = tl.where(is_alone, alone + 1, tl.load(tile_starts + tile + 1))
    own_context = tl.load(context_lens + alone, mask=is_alone, other=NO_LIMIT)
    own_path = tl.load(path_offsets + alone, mask=is_alone, other=0)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m = tl.arange(0, BLOCK_M)
    row, head = start + m // GROUP, kv_head * GROUP + m % GROUP
    is_row = row < end
    pos = tl.load(positions + row, mask=is_row, other=-1).to(tl.int32)
    context = tl.load(context_lens + row, mask=is_row, other=0)
    is_shared = context > pos if WHOLE else (context > pos) | (context // SPLIT > split_index)
    is_row = is_row & tl.where(is_alone, context <= pos, is_shared)
    last = tl.max(tl.where(is_row, pos, -1), 0)
    if last < 0:
        return
    first = tl.maximum(pos - window + 1, 0) if HAS_WINDOW else tl.zeros_like(pos)
    lowest = tl.min(tl.where(is_row, first, NO_LIMIT), 0)
    split_low, split_high = lowest // SPLIT, last // SPLIT + 1
    if not WHOLE:
        split_low = tl.maximum(split_low, tl.where(is_alone, own_context // SPLIT, split_index))
        split_high = tl.where(is_alone, split_high, tl.minimum(split_high, split_index + 1))
    table = tl.load(row_seq + start).to(tl.int64) * table_stride

    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    query_lines = query + row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query_lines[:, None] + k[None, :], mask=is_row[:, None] & (k[None, :] < KEY_DIM), other=0.0)
    q = q.to(keys.dtype.element_ty)
    line = row.to(tl.int64) * NUM_HEADS + head
    to_mask = is_row[:, None] & (v[None, :] < VALUE_DIM)
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
            is_read = n <= last
            slots = _slots(n, last, own_context, own_path, table, path_slots, block_tables, BLOCK_SIZE)
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
        if WHOLE:
            peak, total, result = _fold(peak, total, result, split_peak, split_total, split_out)
        else:
            part = line * num_splits + split
            tl.store(part_peak + part, split_peak, mask=is_row)
            tl.store(part_total + part, split_total, mask=is_row)
            tl.store(part_out + part[:, None] * VALUE_DIM + v[None, :], split_out, mask=to_mask)
    if WHOLE:
        result = result / total[:, None]
        tl.store(out + line[:, None] * VALUE_DIM + v[None, :], result.to(out.dtype.element_ty), mask=to_mask)


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
    # Several at once, so that their loads overlap; splits past the last one are empty.
    for low in range(first // SPLIT, pos // SPLIT + 1, FOLDED_AT_ONCE):
        for i in tl.static_range(FOLDED_AT_ONCE):
            is_split = low + i <= pos // SPLIT
            part = line * num_splits + low + i
            one = tl.arange(0, 1)
            split_peak = tl.load(part_peak + part + one, mask=is_split, other=float("-inf"))
            split_total = tl.load(part_total + part + one, mask=is_split, other=0.0)
            lines = part_out + part * VALUE_DIM + v[None, :]
            split_out = tl.load(lines, mask=is_split & (v < VALUE_DIM)[None, :], other=0.0)
            peak, total, result = _fold(peak, total, result, split_peak, split_total, split_out)
    result = result / total[:, None]
    tl.store(out + line * VALUE_DIM + v[None, :], result.to(out.dtype.element_ty), mask=v[None, :] < VALUE_DIM)
