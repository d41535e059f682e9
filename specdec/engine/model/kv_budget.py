"""Allocates the KV cache, on a GPU by what weights, the largest step, captures and heads leave of its memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.batch import Batch
from specdec.engine.cuda.passes import CAPTURE_BYTES
from specdec.engine.errors import ModelLoadError
from specdec.engine.model.loader import LoadedModel
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.settings import EngineSettings
from specdec.engine.states.memory import CellShape, StateMemory, affordable_states

_CPU_KV_BYTES = 1 << 30
"""Bytes of the KV cache on a CPU where no setting says more."""
_FREE_SHARE = 0.9
_SAMPLED_ROWS = 64  # rows that the sampler takes at once on a GPU
_BYTES_PER_SAMPLED_LOGIT = 64  # top-p: scores sorted with their ids, and integer weights with their sums


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


def allocate_cache(
    settings: EngineSettings,
    loaded: LoadedModel,
    step_model: Callable[[Batch, KVCache], torch.Tensor],
    geometries: list[LayerGeometry],
    cells: list[CellShape],
    kv_dtype: torch.dtype,
    *,
    num_spare_blocks: int,
    beside: Beside,
    group: RankGroup | None,
) -> KVCache:
    """Allocate the KV cache and the states of recurrent layers, with as many blocks as settings and memory allow.

    Raises ModelLoadError, which names the setting, if memory does not suffice.
    """
    reserved = CAPTURE_BYTES if num_spare_blocks else 0  # for captured steps, which have padding rows
    sizes = affordable_states(
        cells,
        settings.kv_cache_memory_bytes or _CPU_KV_BYTES,
        max_batch_seqs=settings.max_batch_seqs,
        max_batch_tokens=settings.rows_of_step(loaded.device.type),
        block_size=settings.block_size,
    )
    num_blocks = settings.num_blocks
    if num_blocks is None:
        block_bytes = sum(g.num_elements for g in geometries) * settings.block_size * kv_dtype.itemsize
        budget = settings.kv_cache_memory_bytes
        if budget is None and loaded.device.type == "cuda":
            block_bytes += beside.cache_bytes(settings.block_size, loaded.dtype)
            budget = affordable_kv_bytes(
                CudaMemory(loaded.device),
                step_model,
                geometries,
                num_rows=settings.rows_of_step(loaded.device.type),
                max_model_len=loaded.max_model_len,
                num_logits=loaded.num_logits,
                block_size=settings.block_size,
                dtype=kv_dtype,
                device=loaded.device,
                memory_fraction=settings.gpu_memory_fraction,
                reserved_bytes=reserved + beside.weight_bytes(loaded.num_logits, loaded.hidden_size, loaded.dtype),
            )
        budget = (_CPU_KV_BYTES if budget is None else budget) - sizes.num_bytes
        num_blocks = _num_blocks(settings, loaded.max_model_len, budget, block_bytes, sizes.num_bytes)
    if group is not None:
        num_blocks = group.smallest(num_blocks)  # one block table serves all ranks
    try:
        return KVCache(
            geometries,
            num_blocks + num_spare_blocks,
            settings.block_size,
            kv_dtype,
            loaded.device,
            StateMemory(cells, sizes.num_slots, sizes.num_rows, loaded.device) if cells else None,
        )
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        name = "num_blocks" if settings.num_blocks else "kv_cache_memory_bytes"
        raise ModelLoadError(f"{name}: {num_blocks} blocks exceed the memory of the machine; lower it") from error


def _num_blocks(settings: EngineSettings, max_model_len: int, budget: int, block_bytes: int, state_bytes: int) -> int:
    """Blocks that a budget of bytes holds, as many as can be of use at most."""
    most_useful = settings.max_batch_seqs * (-(-max_model_len // settings.block_size) + 4)
    num_blocks = min(budget // block_bytes, most_useful) if block_bytes else most_useful
    if num_blocks < 2:
        rest = f" beside {state_bytes} bytes of recurrent layers' states" if state_bytes else ""
        raise ModelLoadError(
            f"kv_cache_memory_bytes: {budget} bytes do not hold two blocks of {block_bytes} bytes{rest}; raise it"
        )
    return int(num_blocks)


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
