"""Attention kernels in plain torch: a row-invariant one, and one that keeps a GPU busy.

A row-invariant kernel fixes the order of all sums by absolute position (tiles of ``TILE`` positions, online softmax
from left to right), so that a row's bits depend on nothing but its own tokens.
"""

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.attention.paged import AttentionOptions, ForwardContext, cache_of
from specdec.engine.batch import Batch

TILE = 16  # positions per softmax tile; a tile's first position is a multiple of it
MAX_PATH_LEN = 65  # a tree has at most 64 nodes, so a path has at most 64 (one to spare)
_GATHER_ELEMENTS = 1 << 26  # keys that the gathering kernel may hold at once


class TiledAttention:
    """Row-invariant attention in plain torch, float32 inside. Cost: a few ATen calls per tile and layer."""

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
        slots = _slots_by_position(context, cache.block_size)  # [T, L]
        num_rows, num_heads, _ = query.shape
        num_kv_heads = key.shape[1]
        group = num_heads // num_kv_heads
        queries = query.float().reshape(num_rows * num_kv_heads, group, -1) * options.scaling
        positions = batch.position_ids[:, None]
        first = _first_positions(positions, options.sliding_window)
        shape = (num_rows, num_kv_heads, group)
        if options.sinks is None:
            peak = queries.new_full(shape, -1e30)
            total = queries.new_zeros(shape)
        else:
            peak = options.sinks.float().view(1, num_kv_heads, group).expand(shape).clone()
            total = queries.new_ones(shape)
        out = queries.new_zeros(*shape, value.shape[2])
        start = int(first.min()) // TILE * TILE
        for tile in range(start, int(positions.max()) + 1, TILE):
            blocks, offsets = (
                slots[:, tile : tile + TILE] // cache.block_size,
                slots[:, tile : tile + TILE] % cache.block_size,
            )
            keys = cache.keys[layer][blocks, :, offsets].float()  # [T, TILE, Hkv, D]
            values = cache.values[layer][blocks, :, offsets].float()
            keys = keys.permute(0, 2, 3, 1).reshape(num_rows * num_kv_heads, -1, TILE)
            values = values.transpose(1, 2).reshape(num_rows * num_kv_heads, TILE, -1)
            scores = torch.bmm(queries, keys).view(*shape, TILE)
            scores = _softcapped(scores, options.softcap)
            covered = torch.arange(tile, tile + TILE, device=slots.device)
            visible = (covered >= first) & (covered <= positions)  # [T, TILE]
            scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
            new_peak = torch.maximum(peak, scores.amax(-1))
            decay = torch.exp(peak - new_peak)
            weights = torch.exp(scores - new_peak[..., None])
            total = total * decay + weights.sum(-1)
            flat = torch.bmm(weights.view(num_rows * num_kv_heads, group, TILE), values)
            out = out * decay[..., None] + flat.view(out.shape)
            peak = new_peak
        out = out / total[..., None]
        return out.reshape(num_rows, num_heads, -1).to(query.dtype)


class GatherAttention:
    """Attention by one gather and two batched products, without any device-to-host copy; float32 inside.

    Not row-invariant: the width of the gather depends on the batch. Rows are taken in chunks that keep the
    gathered keys under a fixed size. A fused kernel for CUDA may replace it behind the same signature.
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

    L is a multiple of ``TILE``. Entries past a row's own position name the row's own slot, to be masked by the
    reader: what others left behind in the block could be NaN, which no weight of zero takes away.
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
    else:  # an upper bound that needs no answer from the device
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
