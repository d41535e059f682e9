"""The step of the slot that compares Triton's attention with torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from bench.gpu_slot.models import BLOCK_SIZE, Found, StepSetup, tree_of
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, ForwardContext
from specdec.engine.attention.torch_kernels import GatherAttention
from specdec.engine.batch import Batch
from specdec.engine.cuda.attention import TritonAttention

_NUM_HEADS = 8


def attention(place: StepSetup) -> Found:
    """Largest differences between Triton's attention and torch's; raises AssertionError above a dtype's limit."""
    found = {}
    limits = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
    for dtype, limit in limits.items():
        if place.dry and dtype == torch.bfloat16:
            continue  # the interpreter computes it wrongly
        for head_dim in (64, 128, 256):
            for name, (batch, options) in _cases(place, head_dim).items():
                error = _attention_error(place, dtype, head_dim, batch, options)
                found[f"{dtype} heads of {head_dim}, {name}"] = error
                place.keep(found)
                if not error <= limit:
                    raise AssertionError(found)
    return found


def _cases(place: StepSetup, head_dim: int) -> dict[str, tuple[Batch, AttentionOptions]]:
    """Batches and options of attention, by name."""
    plain = AttentionOptions(head_dim**-0.5)
    one, few, many = ((1, 40), (8, 200), (20, 90)) if place.dry else ((1, 1000), (8, 5000), (512, 4000))
    of_few = _one_sequence(place, few[1], few[0])
    asked = {
        "": plain,
        ", windows": replace(plain, sliding_window=few[1] // 10),
        ", soft caps": replace(plain, softcap=30.0),
        ", sinks": replace(plain, sinks=torch.linspace(-2.0, 2.0, _NUM_HEADS, device=place.device)),
    }
    named = {
        f"{one[0]} rows after {one[1]}": (_one_sequence(place, one[1], one[0]), plain),
        f"{many[0]} rows after {many[1]}": (_one_sequence(place, many[1], many[0]), plain),
        "several sequences": (_together([of_few, _one_sequence(place, *one), _one_sequence(place, *many)]), plain),
    }
    for what, options in asked.items():
        named[f"{few[0]} rows after {few[1]}{what}"] = (of_few, options)
        named[f"a tree of {few[0]} rows after {few[1]}{what}"] = (tree_of(of_few, few[1]), options)
    return named


def _attention_error(
    place: StepSetup, dtype: torch.dtype, head_dim: int, batch: Batch, options: AttentionOptions
) -> float:
    geometry = LayerGeometry(2, head_dim, head_dim)
    num_rows, num_blocks = batch.input_ids.shape[0], int(batch.block_tables.max()) + 1
    generator = torch.Generator(place.device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=place.device).to(dtype)

    caches = [KVCache([geometry], num_blocks, BLOCK_SIZE, dtype, place.device) for _ in range(2)]
    for store, other in ((caches[0].keys[0], caches[1].keys[0]), (caches[0].values[0], caches[1].values[0])):
        store.copy_(random(*store.shape))
        other.copy_(store)
    query = random(num_rows, _NUM_HEADS, head_dim)
    key, value = random(num_rows, 2, head_dim), random(num_rows, 2, head_dim)
    results = []
    for kernel, cache in ((GatherAttention(), caches[0]), (TritonAttention(), caches[1])):
        results.append(kernel(query, key, value, 0, ForwardContext(batch, cache, kernel), options).float())
    return float((results[0] - results[1]).abs().max())


def _one_sequence(place: StepSetup, start: int, num_rows: int) -> Batch:
    positions = torch.arange(start, start + num_rows, device=place.device)
    empty = torch.zeros(num_rows + 1, dtype=torch.int32, device=place.device)
    tables = torch.arange(-(-(start + num_rows) // BLOCK_SIZE), dtype=torch.int32, device=place.device)[None]
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


def _together(batches: Sequence[Batch]) -> Batch:
    """One batch of sequences without trees, each in blocks of its own."""
    widest = max(batch.block_tables.shape[1] for batch in batches)
    tables, slots, first = [], [], 0
    for batch in batches:
        width = batch.block_tables.shape[1]
        tables.append(pad(batch.block_tables + first, (0, widest - width)))
        slots.append(batch.slot_mapping + first * BLOCK_SIZE)
        first += width
    positions = torch.cat([batch.position_ids for batch in batches])
    seqs = [torch.full_like(batch.row_seq, number) for number, batch in enumerate(batches)]
    return replace(
        batches[0],
        input_ids=positions,
        position_ids=positions,
        slot_mapping=torch.cat(slots),
        row_seq=torch.cat(seqs),
        context_lens=(positions + 1).int(),
        path_offsets=torch.zeros(len(positions) + 1, dtype=torch.int32, device=positions.device),
        block_tables=torch.cat(tables),
        num_seqs=len(batches),
    )
