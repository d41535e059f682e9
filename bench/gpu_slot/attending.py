"""The step of the slot that compares Triton's attention with torch's."""

from __future__ import annotations

import torch

from bench.gpu_slot.models import Found, Place
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, ForwardContext
from specdec.engine.attention.torch_kernels import GatherAttention
from specdec.engine.batch import Batch
from specdec.engine.cuda.attention import TritonAttention


def attention(place: Place) -> Found:
    """Triton's attention against gathering, in each dtype; raises where they are far apart."""
    found = {}
    limits = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
    for dtype, limit in limits.items():
        if place.dry and dtype == torch.bfloat16:
            continue  # wrong in the interpreter
        for head_dim in (64, 128):
            for num_rows, context in ((1, 40), (8, 200)) if place.dry else ((1, 1000), (8, 5000), (512, 4000)):
                error = _attention_error(place, dtype, head_dim, num_rows, context)
                found[f"{dtype} heads of {head_dim}, {num_rows} rows after {context}"] = error
                place.keep(found)
                if not error <= limit:
                    raise AssertionError(found)
    return found


def _attention_error(place: Place, dtype: torch.dtype, head_dim: int, num_rows: int, context: int) -> float:
    geometry, num_heads = LayerGeometry(2, head_dim, head_dim), 8
    generator = torch.Generator(place.device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=place.device).to(dtype)

    caches = [KVCache([geometry], -(-(context + num_rows) // 16), 16, dtype, place.device) for _ in range(2)]
    for store, other in ((caches[0].keys[0], caches[1].keys[0]), (caches[0].values[0], caches[1].values[0])):
        store.copy_(random(*store.shape))
        other.copy_(store)
    query = random(num_rows, num_heads, head_dim)
    key, value = random(num_rows, 2, head_dim), random(num_rows, 2, head_dim)
    batch = _one_sequence(place, context, num_rows)
    options = AttentionOptions(head_dim**-0.5)
    results = []
    for kernel, cache in ((GatherAttention(), caches[0]), (TritonAttention(), caches[1])):
        results.append(kernel(query, key, value, 0, ForwardContext(batch, cache, kernel), options).float())
    return float((results[0] - results[1]).abs().max())


def _one_sequence(place: Place, start: int, num_rows: int) -> Batch:
    positions = torch.arange(start, start + num_rows, device=place.device)
    empty = torch.zeros(num_rows + 1, dtype=torch.int32, device=place.device)
    tables = torch.arange(-(-(start + num_rows) // 16), dtype=torch.int32, device=place.device)[None]
    return Batch(
        input_ids=positions,
        position_ids=positions,
        slot_mapping=positions.clone(),
        row_seq=empty[:-1],
        context_lens=(positions + 1).int(),
        path_offsets=empty,
        path_slots=empty[:0],
        block_tables=tables,
        logits_indices=positions[:0],
        num_seqs=1,
    )
