"""Models of the slot: Llama shapes with random weights, made on the device; small ones without a GPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import LlamaConfig

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.batch import Batch
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.cuda.passes import CudaCapture
from specdec.engine.model.beside import PassRows
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.loader import random_model

Found = dict[str, Any]
"""Findings of a step, as JSON values."""
COPIES = "copies, TB/s"
"""Name of the figure that steps bound by memory are compared with."""
BLOCK_SIZE = 16
_REPEATS, _ROUNDS = 20, 5
_COPIED_BYTES = 1 << 30
_HELD_UP_CYCLES = 40_000_000
"""Cycles that the device is held up: 20 ms at 2 GHz."""
_DEPTHS = 8
"""Levels of large trees; captured steps have room for paths of this length."""
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepSetup:
    """Device and size of a step."""

    device: torch.device
    dry: bool
    keep: Callable[[Found], None] = field(default=lambda found: None)
    """Writes the findings so far, which remain if the step fails or runs out of time."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of models; float32 on CPU, because Triton's interpreter multiplies bfloat16 wrongly."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for all launched work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median_ms(self, run: Callable[[], object], num_repeats: int = _REPEATS) -> float:
        """Median milliseconds of a call with the work that it launches, after warm-up calls; one call if dry."""
        times = []
        for _ in range(1 if self.dry or num_repeats == 1 else 3):
            run()
        for _ in range(1 if self.dry else num_repeats):
            self.synchronize()
            began_s = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - began_s)
        return round(statistics.median(times) * 1000, 4)

    def device_ms(self, run: Callable[[], object]) -> float:
        """Milliseconds of a call on the device alone, the median of rounds.

        In each round many calls are launched while the device is held up, so that it waits for none.
        """
        if self.device.type != "cuda":
            return self.median_ms(run)
        for _ in range(3):
            run()
        times_ms = []
        for _ in range(_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HELD_UP_CYCLES)
            begin.record()
            for _ in range(_REPEATS):
                run()
            end.record()
            self.synchronize()
            times_ms.append(float(begin.elapsed_time(end)) / _REPEATS)
        return round(statistics.median(times_ms), 4)

    def copy_tb_per_s(self) -> float:
        """TB/s of a copy on the device, read and written bytes counted."""
        source = torch.empty(_COPIED_BYTES // (1000 if self.dry else 1), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return round(2 * source.nbytes / self.device_ms(lambda: target.copy_(source)) / 1e9, 3)


@dataclass(slots=True)
class SlotModel:
    """A decoder, and a KV cache for one long sequence and a block of padding."""

    decoder: DeviceDecoder
    cache: KVCache
    vocab_size: int
    weight_bytes: int

    def rows(self, start: int, num_rows: int, context_len: int | None = None) -> Batch:
        """Tokens ``start .. start + num_rows`` of the sequence, with all logits and blocks for ``context_len``."""
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

    def tree(self, start: int, num_rows: int, context_len: int | None = None) -> Batch:
        """The token at ``start`` and a tree below it, in the form of ``tree_of``."""
        batch = tree_of(self.rows(start, num_rows, context_len), start)
        others = torch.arange(num_rows, device=self.cache.device)
        others[chain_rows(num_rows)] = 0
        return replace(batch, input_ids=(batch.position_ids * 7919 + others) % self.vocab_size)


def decoding(model: SlotModel, contexts: Sequence[int]) -> Batch:
    """A row of each of several sequences, after these numbers of tokens. They share the first blocks of the cache."""
    rows = PassRows(BLOCK_SIZE)
    for number, context in enumerate(contexts):
        blocks = list(range(context // BLOCK_SIZE + 1))
        blocks[-1] = model.cache.num_blocks - 2 - number  # the block that it writes
        rows.add_sequence(blocks)
        rows.add(number, context)
    return rows.batch(model.cache.device)


def tree_of(batch: Batch, start: int) -> Batch:
    """The rows of one sequence from ``start`` on as a tree, with the first row as its root.

    The sequence continues in ``chain_rows``; the other rows are their siblings.
    """
    num_rows, device = batch.input_ids.shape[0], batch.input_ids.device
    chain = chain_rows(num_rows)
    width = chain[1] - chain[0] if len(chain) > 1 else 1
    nodes = [divmod(row, width) for row in range(num_rows - 1)]
    paths = [[], *([*chain[:above], 1 + above * width + place] for above, place in nodes)]
    depths = torch.tensor([0, *(above + 1 for above, _ in nodes)], device=device)
    ends = torch.tensor([0, *itertools.accumulate(map(len, paths))], dtype=torch.int32)
    slots = torch.tensor([start + row for path in paths for row in path], dtype=torch.int32)
    return replace(
        batch,
        position_ids=start + depths,
        context_lens=torch.full_like(batch.context_lens, start + 1),
        path_offsets=ends.to(device),
        path_slots=slots.to(device),
    )


def chain_rows(num_rows: int) -> list[int]:
    """Rows of ``SlotModel.tree`` that continue the sequence below the root, by depth."""
    width = max(2, -(-(num_rows - 1) // _DEPTHS))
    return list(range(1, num_rows, width))


def make(name: str, place: StepSetup, max_len: int, *, row_invariant: bool = False) -> SlotModel:
    """A random model of a shape, or of the tiny shape in a dry run; ``row_invariant`` goes to ``DeviceDecoder``."""
    config = LlamaConfig.from_dict({**SHAPES["tiny" if place.dry else name], "max_position_embeddings": max_len})
    model = random_model(config, place.dtype, place.device).eval()
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    geometries = [
        LayerGeometry(config.num_key_value_heads or config.num_attention_heads, head_dim, head_dim)
    ] * config.num_hidden_layers
    options = [AttentionOptions(head_dim**-0.5)] * config.num_hidden_layers
    decoder = DeviceDecoder(model, options, max_len, row_invariant=row_invariant)
    cache = KVCache(geometries, -(-max_len // BLOCK_SIZE) + 1, BLOCK_SIZE, place.dtype, place.device)
    for store in (*cache.keys, *cache.values):
        store.normal_()  # zeros would make a device faster
    return SlotModel(decoder, cache, config.vocab_size, weight_bytes)


def replays_of(place: StepSetup, model: SlotModel) -> BucketedSteps:
    """The model's steps in buckets; without a GPU a replay runs the step again."""
    steps = BucketedSteps(model.decoder, CudaCapture() if place.device.type == "cuda" else _Rerun())
    steps.serve(model.cache)
    return steps


class _Rerun:
    """``Capture`` without a GPU."""

    def held_bytes(self) -> int:
        """Zero: nothing is kept."""
        return 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Return a replay that runs the step again, and its logits."""
        logits = run()

        def replay() -> None:
            logits.copy_(run())

        return replay, logits
