"""Attention kernels in plain torch: a row-invariant one, and one that keeps a GPU busy.

A row-invariant kernel fixes the order of all sums by absolute position: a tree within each tile of ``TILE`` positions,
tiles from left to right. So a row's bits depend on its own tokens only. A library's matrix product fixes no
order: it may differ by shape, layout and CPU.
"""

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.attention.paged import AttentionOptions, ForwardContext, cache_of
from specdec.engine.batch import Batch

TILE = 16  # positions per tile
MAX_PATH_LEN = 65  # a tree has at most 64 nodes (one to spare)
_GATHER_ELEMENTS = 1 << 26  # elements that the gathering kernel holds at once
_PRODUCT_ELEMENTS = 1 << 20  # products that the tiled kernel holds at once; at least one tile of one row


class TiledAttention:
    """Row-invariant attention in plain torch; computes in float32. Cost: about 50 ATen calls per layer, and two per
    tile.

    Sums are trees of element-wise additions, which round alike in any shape, layout and instruction set.
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
        cache = cache_of(context)
        positions = context.batch.position_ids
        cache.write(layer, context.batch.slot_mapping, key, value)
        slots = _slots_by_position(context, cache.block_size)  # [T, L]
        num_rows, num_heads, key_dim = query.shape
        per_position = num_heads * max(key_dim, value.shape[2])
        chunk = max(1, _PRODUCT_ELEMENTS // (per_position * slots.shape[1]))
        span = max(1, _PRODUCT_ELEMENTS // (per_position * chunk * TILE)) * TILE
        parts = [
            self._attend(
                query[i : i + chunk], slots[i : i + chunk], positions[i : i + chunk, None], layer, cache, options, span
            )
            for i in range(0, num_rows, chunk)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _attend(
        query: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        layer: int,
        cache: KVCache,
        options: AttentionOptions,
        span: int,
    ) -> torch.Tensor:
        """Attend ``span`` positions (whole tiles) at a time, which bounds memory without changing a bit."""
        num_rows, num_heads, _ = query.shape
        num_kv_heads = cache.geometries[layer].num_kv_heads
        group = num_heads // num_kv_heads
        queries = query.float().reshape(num_rows, num_kv_heads, group, 1, -1) * options.scaling
        first = _first_positions(positions, options.sliding_window)
        start, end = int(first.min()) // TILE * TILE, (int(positions.max()) // TILE + 1) * TILE
        spans = [(i, min(i + span, end)) for i in range(start, end, span)]
        products = [
            _tree_sum(queries * _read(cache.keys[layer], slots[:, i:j], cache.block_size)[:, :, None], -1)
            for i, j in spans
        ]
        scores = _softcapped(torch.cat(products, -1), options.softcap)  # [T, Hkv, group, end - start]
        covered = torch.arange(start, end, device=slots.device)
        visible = (covered >= first) & (covered <= positions)  # [T, end - start]
        scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
        peak = scores.amax(-1)
        total = torch.zeros_like(peak)
        if options.sinks is not None:
            sinks = options.sinks.float().view(1, num_kv_heads, group)
            peak = torch.maximum(peak, sinks)
            total = torch.exp(sinks - peak)
        weights = torch.exp(scores - peak[..., None])
        out = total.new_zeros(1)
        for i, j in spans:
            values = _read(cache.values[layer], slots[:, i:j], cache.block_size).unflatten(2, (-1, TILE))
            tiles = weights[..., i - start : j - start].unflatten(-1, (-1, TILE))  # [T, Hkv, group, tiles, TILE]
            for tile_total in _tree_sum(tiles, -1).unbind(-1):  # from left to right; masked tiles add zeros
                total = total + tile_total
            for tile_out in _tree_sum(tiles[..., None] * values[:, :, None], -2).unbind(-2):
                out = out + tile_out
        out = out / total[..., None]
        return out.reshape(num_rows, num_heads, -1).to(query.dtype)


class GatherAttention:
    """Attention by one gather and two batched products, without a device-to-host copy; computes in float32.

    Not row-invariant: the width of the gather depends on the batch. Rows are taken in chunks that bound the gathered
    keys' memory.
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
        cache = cache_of(context)
        batch = context.batch
        cache.write(layer, batch.slot_mapping, key, value)
        slots = _slots_by_position(context, cache.block_size)
        num_rows = query.shape[0]
        per_row = slots.shape[1] * cache.geometries[layer].num_elements
        chunk = max(1, _GATHER_ELEMENTS // per_row)
        parts = [
            self._attend(
                query[i : i + chunk],
                slots[i : i + chunk],
                batch.position_ids[i : i + chunk],
                layer,
                cache,
                options,
            )
            for i in range(0, num_rows, chunk)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _attend(
        query: torch.Tensor,
        slots: torch.Tensor,
        position_ids: torch.Tensor,
        layer: int,
        cache: KVCache,
        options: AttentionOptions,
    ) -> torch.Tensor:
        num_rows, num_heads, _ = query.shape
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        keys = cache.keys[layer][blocks, :, offsets].transpose(1, 2)  # [T, Hkv, L, D]
        values = cache.values[layer][blocks, :, offsets].transpose(1, 2)
        num_kv_heads = keys.shape[1]
        queries = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, -1)
        scores = torch.matmul(queries.float(), keys.float().transpose(2, 3)) * options.scaling
        scores = _softcapped(scores, options.softcap)
        covered = torch.arange(slots.shape[1], device=slots.device)
        positions = position_ids[:, None]
        visible = (covered >= _first_positions(positions, options.sliding_window)) & (covered <= positions)
        scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.float().view(1, num_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        out = torch.matmul(weights, values.float())
        return out.reshape(num_rows, num_heads, -1).to(query.dtype)


def _read(store: torch.Tensor, slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """Keys or values of slots ``[T, L]`` as float32 ``[T, Hkv, L, D]``."""
    return store[slots // block_size, :, slots % block_size].float().transpose(1, 2)


def _tree_sum(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over one dimension: adds its upper to its lower half until one element is left."""
    while (size := terms.shape[dim]) > 1:
        half = size // 2
        pairs = terms.narrow(dim, 0, half) + terms.narrow(dim, half, half)
        odd = terms.narrow(dim, 2 * half, size - 2 * half)
        terms = torch.cat([pairs, odd], dim) if size % 2 else pairs
    return terms.squeeze(dim)


def _first_positions(positions: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """First visible position of each row; positions ``[T, 1]``."""
    if sliding_window is None:
        return torch.zeros_like(positions)
    return (positions - (sliding_window - 1)).clamp_(min=0)


def _softcapped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    if softcap is None:
        return scores
    return torch.tanh(scores / softcap) * softcap


def _slots_by_position(context: ForwardContext, block_size: int) -> torch.Tensor:
    """Physical slot of every position of every row, ``[T, L]``, computed once per pass.

    L is a multiple of ``TILE``. Entries behind a row's own position repeat the row's own slot; the caller masks them.
    Other slots may hold NaN, which a weight of zero would not remove.
    """
    slots: torch.Tensor | None = context.scratch.get("slots")
    if slots is None:
        slots = context.scratch["slots"] = _map_slots(context.batch, block_size)
    return slots


def _map_slots(batch: Batch, block_size: int) -> torch.Tensor:
    tables = batch.block_tables.long()
    num_path_slots = batch.path_slots.shape[0]
    if batch.input_ids.device.type == "cpu":
        width = int(batch.position_ids.max()) + 1
    else:  # an upper bound, without waiting for the device
        width = tables.shape[1] * block_size + min(num_path_slots, MAX_PATH_LEN)
    width = -(-width // TILE) * TILE
    positions = torch.arange(width, device=tables.device)
    logical = (positions // block_size).clamp_(max=tables.shape[1] - 1)
    slots = tables[batch.row_seq.long()][:, logical] * block_size + positions % block_size
    if num_path_slots:
        along_path = positions - batch.context_lens.long()[:, None]  # [T, L]
        index = (batch.path_offsets[:-1].long()[:, None] + along_path).clamp_(0, num_path_slots - 1)
        slots = torch.where(along_path >= 0, batch.path_slots.long()[index], slots)
    return torch.where(positions <= batch.position_ids[:, None], slots, batch.slot_mapping[:, None])
