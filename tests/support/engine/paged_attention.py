"""Rows that attend over a paged cache, for tests of any attention kernel."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionKernel, AttentionOptions, ForwardContext
from specdec.engine.batch import Batch

BLOCK_SIZE = 8


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Paged:
    """Two sequences in scattered blocks, and rows that read them: plain rows, and nodes of a tree."""

    def __init__(self, geometry: LayerGeometry, num_heads: int, lengths: tuple[int, int] = (45, 18)) -> None:
        self.geometry = geometry
        self.num_blocks = 24
        shuffled = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(3)).int()
        tables = shuffled.view(2, -1)
        positions, seqs, contexts, slots = [], [], [], []
        offsets: list[int] = [0]
        paths: list[int] = []

        def slot(seq: int, logical: int) -> int:
            return int(tables[seq, logical // BLOCK_SIZE]) * BLOCK_SIZE + logical % BLOCK_SIZE

        for seq, length in enumerate(lengths):
            for position in range(length):
                positions.append(position)
                contexts.append(position + 1)
                slots.append(slot(seq, position))
                seqs.append(seq)
                offsets.append(len(paths))
            # a fork of depth 2: nodes 0 and 1 below the last token, 2 below 1
            for node, ancestors in enumerate(([0], [1], [1, 2])):
                positions.append(length - 1 + len(ancestors))
                contexts.append(length)
                slots.append(slot(seq, length + node))
                seqs.append(seq)
                paths += [slot(seq, length + ancestor) for ancestor in ancestors]
                offsets.append(len(paths))
        num_rows = len(positions)
        int32 = torch.int32
        self.batch = Batch(
            input_ids=torch.zeros(num_rows, dtype=torch.int64),
            position_ids=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            row_seq=torch.tensor(seqs, dtype=int32),
            context_lens=torch.tensor(contexts, dtype=int32),
            path_offsets=torch.tensor(offsets, dtype=int32),
            path_slots=torch.tensor(paths, dtype=int32),
            block_tables=tables,
            logits_indices=torch.zeros(0, dtype=torch.int64),
            num_seqs=2,
        )
        self.query = random_rows(num_rows, num_heads, geometry.key_dim, seed=4)
        self.key = random_rows(num_rows, geometry.num_kv_heads, geometry.key_dim, seed=5)
        self.value = random_rows(num_rows, geometry.num_kv_heads, geometry.value_dim, seed=6)
        if geometry.values_in_keys:
            self.value = self.key[..., : geometry.value_dim]

    def empty_cache(self) -> KVCache:
        return KVCache([self.geometry], self.num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))

    def run(self, kernel: AttentionKernel, options: AttentionOptions) -> torch.Tensor:
        """Attention of all rows, through a new cache."""
        return self.run_rows(kernel, options, range(len(self.query)), self.empty_cache())

    def run_rows(
        self, kernel: AttentionKernel, options: AttentionOptions, rows: Sequence[int], cache: KVCache
    ) -> torch.Tensor:
        """Attention of some rows in this order; the cache must hold the other slots that they read."""
        chosen = torch.tensor(rows)
        batch = self._batch_of(chosen)
        context = ForwardContext(batch, cache, kernel)
        # Strided as in transformers: heads outside rows.
        query, key, value = (
            data[chosen].transpose(0, 1).contiguous().transpose(0, 1) for data in (self.query, self.key, self.value)
        )
        options = replace(options, values_in_keys=self.geometry.values_in_keys)
        return context.kernel(query, key, value, 0, context, options)

    def _batch_of(self, chosen: torch.Tensor) -> Batch:
        batch = self.batch
        starts, ends = batch.path_offsets[:-1][chosen].tolist(), batch.path_offsets[1:][chosen].tolist()
        lengths = torch.tensor([0, *(end - start for start, end in zip(starts, ends, strict=True))])
        paths = [batch.path_slots[start:end] for start, end in zip(starts, ends, strict=True)]
        return replace(
            batch,
            **{
                name: getattr(batch, name)[chosen]
                for name in ("input_ids", "position_ids", "slot_mapping", "row_seq", "context_lens")
            },
            path_offsets=lengths.cumsum(0).int(),
            path_slots=torch.cat(paths),
        )


OPTIONS = {
    "plain": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, sliding_window=5),
    "window of a tile": AttentionOptions(0.3, sliding_window=16),
    "softcap": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, sinks=torch.linspace(-2, 2, 6)),
}
GEOMETRIES = [
    LayerGeometry(2, 64, 64),
    LayerGeometry(6, 32, 32),
    LayerGeometry(1, 128, 128),
    LayerGeometry(2, 24, 24),
    LayerGeometry(3, 40, 16),
    LayerGeometry(2, 5, 3),
    LayerGeometry(1, 512, 512),
    LayerGeometry(2, 640, 520),
    LayerGeometry(1, 28, 20, values_in_keys=True),
    LayerGeometry(1, 576, 512, values_in_keys=True),
]
