"""Paged attention in Triton: ragged batches of prefill chunks, decodes and trees.

``plan_kernel`` lists a pass's work: the splits of ``SPLIT`` positions, counted from position 0, that each tile of rows
sees. Programs of ``attention_kernel`` go through the list; each entry starts from zero and writes a part of the result,
and ``fold_kernel`` sums a row's parts. A row's operations and their order depend on its own positions alone: rows of
one tile share only loads, as a row of a matrix product depends on no other row.

The loop over positions has no branch, so that loads run ahead of products. Rows of a branching tree have positions that
they do not share; an entry of its own for each such row has them, in place of a branch.
"""

import triton
import triton.language as tl

NO_LIMIT = tl.constexpr(2147483647)
FOLDED_AT_ONCE = tl.constexpr(16)
# Parts of one packed copy, and sizes of a batch: a kernel is compiled once for all alignments and values of these.
_OF_BATCH = ["row_seq", "position_ids", "context_lens", "path_offsets", "path_slots", "block_tables"]
_SIZES = ["table_stride", "first_row", "end_row", "most", "num_splits", "window"]


@triton.jit
def _append(work, most, row, end, split, end_split, BLOCK: tl.constexpr):
    """Append the splits [``split``, ``end_split``) of rows [``row``, ``end``) to the list."""
    num = tl.maximum(end_split - split, 0)
    at = tl.atomic_add(work, num) + 1
    for low in range(0, num, BLOCK):
        i = low + tl.arange(0, BLOCK)
        to, is_one = work + at + i, i < num
        tl.store(to, row + tl.zeros_like(i), mask=is_one)
        tl.store(to + most, end + tl.zeros_like(i), mask=is_one)
        tl.store(to + 2 * most, split + i, mask=is_one)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_OF_BATCH)
def plan_kernel(
    entries, row_seq, position_ids, context_lens, first_row, end_row, most, window,
    ROWS_PER_TILE: tl.constexpr, BLOCK_ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the work of the tile that begins with a row, and of the row alone if it has a path; grid (rows,).

    ``entries`` is their number, at first 0, then their first rows, their end rows and their splits, ``most`` of
    each. A row alone ends where it begins. Entries are in any order, on which no result depends.
    """
    row = first_row + tl.program_id(0)
    seq = tl.load(row_seq + row)
    left = ROWS_PER_TILE - tl.program_id(0) % ROWS_PER_TILE
    before = tl.load(row_seq + row - 1, mask=row > first_row, other=-1)
    m = tl.arange(0, BLOCK_ROWS)
    is_own = (m < left) & (row + m < end_row)
    is_own &= tl.load(row_seq + row + m, mask=is_own, other=-1) == seq
    pos = tl.load(position_ids + row + m, mask=is_own, other=0).to(tl.int32)
    context = tl.load(context_lens + row + m, mask=is_own, other=0)
    lowest = tl.where(window > 0, tl.maximum(pos - window + 1, 0), 0) // SPLIT
    # A row with a path shares the splits that end before the path begins.
    ends = tl.where(context > pos, pos // SPLIT + 1, context // SPLIT)
    if (left == ROWS_PER_TILE) | (before != seq):
        low = tl.min(tl.where(is_own, lowest, NO_LIMIT), 0)
        _append(entries, most, row, row + tl.sum(is_own.to(tl.int32), 0), low, tl.max(ends, 0), BLOCK)
    own_pos, own_context = tl.load(position_ids + row).to(tl.int32), tl.load(context_lens + row)
    if own_context <= own_pos:
        own_low = tl.sum(tl.where(m == 0, lowest, 0), 0)
        _append(entries, most, row, row, tl.maximum(own_low, own_context // SPLIT), own_pos // SPLIT + 1, BLOCK)


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
def _slots(n, last, context, path, table, path_slots, block_tables, BLOCK_SIZE: tl.constexpr):
    """Physical slots of positions ``n``: below ``context`` from the block table, from there on from the path."""
    by_table = n < context
    from_where = tl.where(by_table, block_tables + table + n // BLOCK_SIZE, path_slots + path + (n - context))
    found = tl.load(from_where, mask=n <= last, other=0).to(tl.int64)
    return tl.where(by_table, found * BLOCK_SIZE + n % BLOCK_SIZE, found)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_OF_BATCH)
def attention_kernel(
    query, query_row_stride, query_head_stride, keys, values, part_peak, part_total, part_out,
    row_seq, position_ids, context_lens, path_offsets, path_slots, block_tables, table_stride,
    entries, most, first_row, num_splits, window, scaling, softcap,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Parts of the listed work for one KV head; grid (any number of programs, KV heads).

    Parts are [rows, heads, splits], with rows from ``first_row`` on.
    """
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m, k, v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    head = kv_head * GROUP + m % GROUP
    for i in range(tl.program_id(0), tl.load(entries), tl.num_programs(0)):
        entry = entries + 1 + i
        start, end, split = tl.load(entry), tl.load(entry + most), tl.load(entry + 2 * most)
        # Chosen without a branch: after a branch, Triton does not recognize contiguous loads.
        is_alone = start == end
        own_context = tl.load(context_lens + start, mask=is_alone, other=NO_LIMIT)
        own_path = tl.load(path_offsets + start, mask=is_alone, other=0)
        row = start + m // GROUP
        is_row = row < tl.where(is_alone, start + 1, end)
        pos = tl.load(position_ids + row, mask=is_row, other=-1).to(tl.int32)
        context = tl.load(context_lens + row, mask=is_row, other=0)
        is_row = is_row & (is_alone | (context > pos) | (context // SPLIT > split))
        last = tl.max(tl.where(is_row, pos, -1), 0)
        first = tl.maximum(pos - window + 1, 0) if HAS_WINDOW else tl.zeros_like(pos)
        lowest = tl.min(tl.where(is_row, first, NO_LIMIT), 0)
        table = tl.load(row_seq + start).to(tl.int64) * table_stride
        query_lines = query + row.to(tl.int64) * query_row_stride + head * query_head_stride
        q = tl.load(query_lines[:, None] + k[None, :], mask=is_row[:, None] & (k[None, :] < KEY_DIM), other=0.0)
        if keys.dtype.element_ty.primitive_bitwidth > 8:  # products of 8 bits are computed in the query's type
            q = q.to(keys.dtype.element_ty)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        low = tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
        for tile_low in range(low, tl.minimum((split + 1) * SPLIT, last + 1), BLOCK_N):
            n = tile_low + tl.arange(0, BLOCK_N)
            is_read = n <= last
            slots = _slots(n, last, own_context, own_path, table, path_slots, block_tables, BLOCK_SIZE)
            # In the cache, seen as [block * kv head * slot, dim].
            lines = ((slots // BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slots % BLOCK_SIZE
            key_mask = is_read[None, :] & (k[:, None] < KEY_DIM)
            key_tile = tl.load(keys + lines[None, :] * KEY_DIM + k[:, None], mask=key_mask, other=0.0)
            products = tl.dot(q, key_tile.to(q.dtype), input_precision="ieee")
            scores = _scores(products, n, pos, first, scaling, softcap, HAS_SOFTCAP)
            weights, before, peak, total = _weights(scores, peak, total)
            value_mask = is_read[:, None] & (v[None, :] < VALUE_DIM)
            value_tile = tl.load(values + lines[:, None] * VALUE_DIM + v[None, :], mask=value_mask, other=0.0)
            result = result * before[:, None]
            result = tl.dot(weights.to(q.dtype), value_tile.to(q.dtype), acc=result, input_precision="ieee")
        part = ((row - first_row).to(tl.int64) * NUM_HEADS + head) * num_splits + split
        tl.store(part_peak + part, peak, mask=is_row)
        tl.store(part_total + part, total, mask=is_row)
        to_mask = is_row[:, None] & (v[None, :] < VALUE_DIM)
        tl.store(part_out + part[:, None] * VALUE_DIM + v[None, :], result, mask=to_mask)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_OF_BATCH)
def fold_kernel(
    sinks, out, part_peak, part_total, part_out, position_ids, first_row, num_splits, window,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of one row and head for some of the head's dimensions; grid (rows, heads, dimensions / BLOCK_V).

    Parts are summed 16 at once, counted from split 0, so that their loads overlap.
    """
    row, head = first_row + tl.program_id(0).to(tl.int64), tl.program_id(1)
    pos = tl.load(position_ids + row).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(pos - window + 1, 0), 0) // SPLIT
    begin, end = first // FOLDED_AT_ONCE * FOLDED_AT_ONCE, pos // SPLIT + 1
    i = tl.arange(0, FOLDED_AT_ONCE)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    line = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * num_splits
    peak = tl.load(sinks + head).to(tl.float32) if HAS_SINKS else float("-inf")
    best = tl.full([FOLDED_AT_ONCE], peak, tl.float32)
    for low in range(begin, end, FOLDED_AT_ONCE):
        is_part = (low + i >= first) & (low + i < end)
        best = tl.maximum(best, tl.load(part_peak + line + low + i, mask=is_part, other=float("-inf")))
    highest = tl.max(best, 0)
    totals = tl.where(i == 0, tl.exp(peak - highest), 0.0) if HAS_SINKS else tl.zeros([FOLDED_AT_ONCE], tl.float32)
    result = tl.zeros([BLOCK_V], tl.float32)
    for low in range(begin, end, FOLDED_AT_ONCE):
        part = line + low + i
        is_part = (low + i >= first) & (low + i < end)
        factor = tl.exp(tl.load(part_peak + part, mask=is_part, other=float("-inf")) - highest)
        totals += tl.load(part_total + part, mask=is_part, other=0.0) * factor
        lines = part_out + part[:, None] * VALUE_DIM + v[None, :]
        outs = tl.load(lines, mask=is_part[:, None] & (v < VALUE_DIM)[None, :], other=0.0)
        result += tl.sum(outs * factor[:, None], 0)
    result = result / tl.sum(totals, 0)
    to = out + (row * NUM_HEADS + head) * VALUE_DIM + v
    tl.store(to, result.to(out.dtype.element_ty), mask=v < VALUE_DIM)
