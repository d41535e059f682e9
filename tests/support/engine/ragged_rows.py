"""Batches of attention rows as in steps, drawn by hypothesis: ends of prefills, decodes and trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionKernel, AttentionOptions, ForwardContext
from specdec.engine.batch import Batch

NUM_HEADS = 6


@dataclass(slots=True)
class RaggedRows:
    """Rows of attention, and a cache that holds their earlier tokens and NaN everywhere else."""

    batch: Batch
    cache: KVCache
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def run(self, kernel: AttentionKernel, options: AttentionOptions) -> tuple[torch.Tensor, KVCache]:
        """Attention of all rows, and a copy of the cache after it."""
        cache = copy_of(self.cache)
        return self._run(kernel, options, self.batch, cache, torch.arange(len(self.query))), cache

    def run_row(self, kernel: AttentionKernel, options: AttentionOptions, row: int, cache: KVCache) -> torch.Tensor:
        """Attention of one row alone; the cache must hold all slots that it reads."""
        batch, start, end = self.batch, *self.batch.path_offsets[row : row + 2].tolist()
        alone = replace(
            batch,
            **{name: getattr(batch, name)[row : row + 1] for name in ("input_ids", "position_ids", "slot_mapping")},
            row_seq=batch.row_seq[:1] * 0,
            context_lens=batch.context_lens[row : row + 1],
            path_offsets=torch.tensor([0, end - start], dtype=torch.int32, device=batch.path_offsets.device),
            path_slots=batch.path_slots[start:end],
            block_tables=batch.block_tables[batch.row_seq[row : row + 1].long()],
            num_seqs=1,
        )
        return self._run(kernel, options, alone, cache, torch.tensor([row]))[0]

    def run_in_place(
        self, kernel: AttentionKernel, options: AttentionOptions, row: int, written: KVCache
    ) -> torch.Tensor:
        """Attention of one row as in plain decoding, over ordered blocks with the slots of `written` that it reads."""
        batch, block_size = self.batch, self.cache.block_size
        position, context = int(batch.position_ids[row]), int(batch.context_lens[row])
        table = batch.block_tables[int(batch.row_seq[row])].tolist()
        start = int(batch.path_offsets[row])
        slots = [table[p // block_size] * block_size + p % block_size for p in range(context)]
        slots += batch.path_slots[start : start + position + 1 - context].tolist()
        num_blocks = position // block_size + 1
        cache = KVCache(written.geometries, num_blocks, block_size, written.dtype, written.device)
        for stores, own in ((written.keys, cache.keys), (written.values, cache.values)):
            for p, slot in enumerate(slots):
                own[0][p // block_size, :, p % block_size] = stores[0][slot // block_size, :, slot % block_size]
        device = batch.path_offsets.device
        alone = replace(
            batch,
            input_ids=batch.input_ids[:1],
            position_ids=batch.position_ids[row : row + 1],
            slot_mapping=batch.position_ids[row : row + 1],
            row_seq=batch.row_seq[:1] * 0,
            context_lens=torch.tensor([position + 1], dtype=torch.int32, device=device),
            path_offsets=torch.zeros(2, dtype=torch.int32, device=device),
            path_slots=batch.path_slots[:0],
            block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
            num_seqs=1,
        )
        return self._run(kernel, options, alone, cache, torch.tensor([row]))[0]

    def _run(
        self, kernel: AttentionKernel, options: AttentionOptions, batch: Batch, cache: KVCache, rows: torch.Tensor
    ) -> torch.Tensor:
        # Strided as in transformers: heads outside rows.
        query, key, value = (
            data[rows].transpose(0, 1).contiguous().transpose(0, 1) for data in (self.query, self.key, self.value)
        )
        return kernel(query, key, value, 0, ForwardContext(batch, cache, kernel), options)


def copy_of(cache: KVCache) -> KVCache:
    """Another cache with the same contents."""
    copy = KVCache(cache.geometries, cache.num_blocks, cache.block_size, cache.dtype, cache.device)
    for layer in range(cache.num_layers):
        copy.keys[layer].copy_(cache.keys[layer])
        copy.values[layer].copy_(cache.values[layer])
    return copy


@st.composite
def ragged_rows(
    draw: Any,
    device: str,
    dtype: torch.dtype = torch.float32,
    max_len: int = 100,
    geometries: tuple[LayerGeometry, ...] = (LayerGeometry(2, 16, 16), LayerGeometry(3, 24, 8), LayerGeometry(6, 5, 3)),
    num_heads: int = NUM_HEADS,
    most_nodes: int = 5,
) -> RaggedRows:
    """One to three sequences, each with last tokens to compute and a tree below them."""
    geometry = draw(st.sampled_from(geometries))
    block_size = draw(st.sampled_from((1, 5, 8, 16, 32, 64)))
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, max_len))
        num_new = draw(st.integers(1, min(length, 18)))
        parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, most_nodes)))]
        sequences.append((length, num_new, parents))
    return lay_out(sequences, geometry, block_size, dtype, device, draw(st.integers(0, 1000)), num_heads)


def lay_out(
    sequences: list[tuple[int, int, list[int]]],
    geometry: LayerGeometry,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    num_heads: int = NUM_HEADS,
) -> RaggedRows:
    """Rows of sequences: (number of tokens, number of new ones, parents of the nodes; -1 is the last token)."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-(length + len(parents)) // block_size) for length, _, parents in sequences]
    shuffled = torch.randperm(sum(num_blocks), generator=generator).tolist()
    tables = torch.zeros(len(sequences), max(num_blocks), dtype=torch.int32)
    positions, slots, seqs, contexts, offsets, paths = [], [], [], [], [0], []
    known = []  # slots of earlier tokens
    for seq, (length, num_new, parents) in enumerate(sequences):
        own = [shuffled.pop() for _ in range(num_blocks[seq])]
        tables[seq, : len(own)] = torch.tensor(own)
        slot_of = [own[p // block_size] * block_size + p % block_size for p in range(length + len(parents))]
        known += slot_of[: length - num_new]
        for position in range(length - num_new, length):
            positions.append(position)
            contexts.append(position + 1)
            slots.append(slot_of[position])
            offsets.append(len(paths))
        for node in range(len(parents)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            positions.append(length - 1 + len(path))
            slots.append(slot_of[length + node])
            in_place = path == list(range(node + 1))  # chains, as in `build_batch`
            contexts.append(length + len(path) if in_place else length)
            paths += [] if in_place else [slot_of[length + ancestor] for ancestor in path]
            offsets.append(len(paths))
        seqs += [seq] * (num_new + len(parents))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def ints(values: list[int], kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    cache = KVCache([geometry], sum(num_blocks), block_size, dtype, torch.device(device))
    for store in (cache.keys[0], cache.values[0]):
        store.fill_(torch.nan)
        for slot in known:
            store[slot // block_size, :, slot % block_size] = random(store.shape[1], store.shape[3])
    num_rows = len(positions)
    batch = Batch(
        input_ids=ints([0] * num_rows, torch.int64),
        position_ids=ints(positions, torch.int64),
        slot_mapping=ints(slots, torch.int64),
        row_seq=ints(seqs),
        context_lens=ints(contexts),
        path_offsets=ints(offsets),
        path_slots=ints(paths),
        block_tables=tables.to(device),
        logits_indices=ints([], torch.int64),
        num_seqs=len(sequences),
    )
    return RaggedRows(
        batch,
        cache,
        random(num_rows, num_heads, geometry.key_dim),
        random(num_rows, geometry.num_kv_heads, geometry.key_dim),
        random(num_rows, geometry.num_kv_heads, geometry.value_dim),
    )
