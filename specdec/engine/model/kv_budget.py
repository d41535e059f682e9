"""Computes the KV cache's share of a GPU's memory, after weights, the largest step, captures and heads."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import modeling_utils

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.batch import Batch

_FREE_SHARE = 0.9
_SAMPLED_ROWS = 64  # rows that the sampler takes at once on a GPU
_BYTES_PER_SAMPLED_LOGIT = 64  # top-p: scores sorted with their ids, and integer weights with their sums

_AHEAD = "caching_allocator_warmup"
"""transformers' function that allocates the memory of all weights in one piece."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Device memory of what is loaded later beside the KV cache: heads."""

    num_bytes: int = 0
    """Bytes of weights."""
    num_embeddings: int = 0
    """Copies of the model's embedding or output layer."""
    elements_per_token: int = 0
    """Elements of keys and values per token of the KV cache."""

    def weight_bytes(self, num_logits: int, hidden_size: int, dtype: torch.dtype) -> int:
        """Bytes of all but keys and values, for a target of these sizes."""
        return self.num_bytes + self.num_embeddings * num_logits * hidden_size * dtype.itemsize

    def cache_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values for `num_tokens` of the target's cache."""
        return self.elements_per_token * num_tokens * dtype.itemsize


NOTHING = Beside()


class DeviceMemory(Protocol):
    """A device's memory."""

    def free_bytes(self) -> int:
        """Bytes that no process has allocated."""

    def total_bytes(self) -> int:
        """Bytes of the device."""

    def own_bytes(self) -> int:
        """Bytes that this process has allocated."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Peak of allocated bytes during ``run``, minus those allocated before."""


class CudaMemory:
    """Memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """See ``DeviceMemory``. Memory cached by torch's allocator counts as free."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total_bytes(self) -> int:
        """See ``DeviceMemory``."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def own_bytes(self) -> int:
        """See ``DeviceMemory``."""
        return int(torch.cuda.memory_allocated(self._device))

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """See ``DeviceMemory``."""
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before


def affordable_kv_bytes(
    memory: DeviceMemory,
    forward: Callable[[Batch, KVCache], torch.Tensor],
    geometries: Sequence[LayerGeometry],
    *,
    num_rows: int,
    max_model_len: int,
    num_logits: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    memory_fraction: float | None = None,
    reserved_bytes: int = 0,
) -> int:
    """Bytes for the KV cache; measures one pass of ``num_rows`` rows with logits of all.

    A tenth of the rest stays free, besides ``reserved_bytes``; the result may be negative. With ``memory_fraction``
    this process uses at most that share of the device. Cost: the pass, over a small cache of its own, which counts as
    part of the pass.
    """
    batch, num_blocks = largest_batch(num_rows, max_model_len, block_size, device)
    of_pass = memory.peak_bytes(lambda: forward(batch, KVCache(geometries, num_blocks, block_size, dtype, device)))
    of_sampling = min(num_rows, _SAMPLED_ROWS) * num_logits * _BYTES_PER_SAMPLED_LOGIT
    free = memory.free_bytes()
    if memory_fraction is not None:
        free = min(free, int(memory_fraction * memory.total_bytes()) - memory.own_bytes())
    return int((free - of_pass - of_sampling - reserved_bytes) * _FREE_SHARE)


def largest_batch(num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> tuple[Batch, int]:
    """A prefill of ``num_rows`` tokens in few sequences with all logits, and the KV blocks that it needs."""
    length = min(num_rows, max_model_len)
    num_seqs, blocks_per_seq = -(-num_rows // length), -(-length // block_size)
    rows = torch.arange(num_rows, device=device)
    seqs, positions = rows // length, rows % length
    batch = Batch(
        input_ids=torch.zeros_like(rows),
        position_ids=positions,
        slot_mapping=seqs * blocks_per_seq * block_size + positions,
        row_seq=seqs.int(),
        context_lens=(positions + 1).int(),
        path_offsets=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
        path_slots=torch.zeros(0, dtype=torch.int32, device=device),
        block_tables=torch.arange(num_seqs * blocks_per_seq, dtype=torch.int32, device=device).view(num_seqs, -1),
        logits_indices=rows,
        num_seqs=num_seqs,
    )
    return batch, num_seqs * blocks_per_seq


@contextlib.contextmanager
def allocated_one_by_one() -> Iterator[None]:
    """Make transformers allocate each weight on its own, so that a freed weight's memory can be reused.

    transformers allocates all weights in one piece first, which saves some hundred allocations of a millisecond. Our
    decoder joins weights, and the holes that remain in that piece can be neither freed nor reused: 16 of 60 GiB in a
    model of torch's allocator (weights in the order of four loading threads).
    """
    ahead = getattr(modeling_utils, _AHEAD, None)
    if ahead is None:
        yield
        return
    setattr(modeling_utils, _AHEAD, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        setattr(modeling_utils, _AHEAD, ahead)
