"""Models of the slot: Llama shapes with random weights, made on the device; small ones without a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.batch import Batch
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.loader import random_model

Found = dict[str, Any]
"""What a step found, as JSON has it."""
BLOCK_SIZE = 16
_REPEATS = 20
_SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step runs, and how large it is."""

    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of models: the interpreter's products of bfloat16 are wrong."""
        return torch.float32 if self.dry else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median_ms(self, run: Callable[[], object]) -> float:
        """The median time of calls with all that they launch, after three that are not counted; of one if dry."""
        times = []
        for _ in range(1 if self.dry else 3):
            run()
        for _ in range(1 if self.dry else _REPEATS):
            self.synchronize()
            began_s = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - began_s)
        return round(statistics.median(times) * 1000, 4)


@dataclass(slots=True)
class SlotModel:
    """A decoder and a cache for one long sequence, and a block for padding."""

    decoder: DeviceDecoder
    cache: KVCache
    vocab_size: int
    weight_bytes: int

    def rows(self, start: int, num_rows: int, context_len: int | None = None) -> Batch:
        """Tokens ``start .. start + num_rows`` of the sequence, all logits wanted; a table for ``context_len``."""
        device = self.cache.device
        positions = torch.arange(start, start + num_rows, device=device)
        num_blocks = -(-(context_len or start + num_rows) // BLOCK_SIZE)
        return Batch(
            input_ids=positions * 7919 % self.vocab_size,
            position_ids=positions,
            slot_mapping=positions.clone(),
            row_seq=torch.zeros(num_rows, dtype=torch.int32, device=device),
            context_lens=(positions + 1).int(),
            path_offsets=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            path_slots=torch.zeros(0, dtype=torch.int32, device=device),
            block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
            logits_indices=torch.arange(num_rows, device=device),
            num_seqs=1,
        )


def make(name: str, place: Place, max_len: int, *, row_invariant: bool = False) -> SlotModel:
    """A model of a shape, or the tiny one in a dry run; ``row_invariant`` as ``DeviceDecoder`` takes it."""
    config = LlamaConfig.from_dict({**_SHAPES["tiny" if place.dry else name], "max_position_embeddings": max_len})
    model = random_model(config, place.dtype, place.device).eval()
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    geometries = [
        LayerGeometry(config.num_key_value_heads or config.num_attention_heads, head_dim, head_dim)
    ] * config.num_hidden_layers
    options = [AttentionOptions(head_dim**-0.5)] * config.num_hidden_layers
    decoder = DeviceDecoder(model, geometries, options, max_len, row_invariant=row_invariant)
    cache = KVCache(geometries, -(-max_len // BLOCK_SIZE) + 1, BLOCK_SIZE, place.dtype, place.device)
    return SlotModel(decoder, cache, config.vocab_size, weight_bytes)
