"""Steps of few rows as replays: batches are padded to buckets, so that a few captured shapes serve them all.

A captured step costs one launch in place of three hundred. Its tensors stay where they are: a batch is copied into
them, and padded with rows of a sequence of their own, which writes and reads a block that no other sequence has.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.tap import HiddenTap

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_PATH_SLOTS_PER_ROW = 8
_MOST_GRAPHS = 48
_logger = logging.getLogger(__name__)

Forward = Callable[[Batch, KVCache], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Captures a function of no arguments; returns what replays it, and the tensor that it then fills."""
Key = tuple[int, int, int, int]


def bucket_of(batch: Batch) -> Key | None:
    """Rows, sequences, blocks of a table and path slots of the captured step that serves a batch; None if none does.

    With sequences of one row each there are as many sequences as rows, otherwise one more than the batch has, at most.
    """
    num_rows, num_slots = batch.input_ids.shape[0], batch.path_slots.shape[0]
    if num_rows > ROW_BUCKETS[-1]:
        return None
    rows = next(bucket for bucket in ROW_BUCKETS if bucket >= num_rows)
    num_seqs = batch.num_seqs + (rows > num_rows)
    seqs = min(rows, 1 << (num_seqs - 1).bit_length())
    slots = _PATH_SLOTS_PER_ROW * rows if num_slots else 0
    if num_slots > slots:
        return None
    return rows, max(seqs, num_seqs), 1 << max(3, (batch.block_tables.shape[1] - 1).bit_length()), slots


def empty_batch(key: Key, device: torch.device, spare_block: int) -> Batch:
    """A batch of padding only: every row is the first token of a sequence in the spare block."""
    num_rows, num_seqs, num_blocks, num_slots = key

    def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return Batch(
        input_ids=full(num_rows, dtype=torch.int64),
        position_ids=full(num_rows, dtype=torch.int64),
        slot_mapping=full(num_rows, dtype=torch.int64),
        row_seq=full(num_rows, value=num_seqs - 1),
        context_lens=full(num_rows, value=1),
        path_offsets=full(num_rows + 1),
        path_slots=full(num_slots),
        block_tables=full(num_seqs, num_blocks, value=spare_block),
        logits_indices=torch.arange(num_rows, device=device),
        num_seqs=num_seqs,
    )


def fill(static: Batch, batch: Batch, spare_block: int, block_size: int) -> None:
    """Copy a batch into one of its bucket; rows that are left are padding. Waits for nothing."""
    num_rows, num_slots = batch.input_ids.shape[0], batch.path_slots.shape[0]
    static.input_ids.zero_()
    static.position_ids.zero_()
    static.slot_mapping.fill_(spare_block * block_size)
    static.row_seq.fill_(static.num_seqs - 1)
    static.context_lens.fill_(1)
    static.block_tables.fill_(spare_block)
    for name in ("input_ids", "position_ids", "slot_mapping", "row_seq", "context_lens"):
        getattr(static, name)[:num_rows].copy_(getattr(batch, name), non_blocking=True)
    static.path_offsets[: num_rows + 1].copy_(batch.path_offsets, non_blocking=True)
    static.path_offsets[num_rows + 1 :] = num_slots
    static.path_slots[:num_slots].copy_(batch.path_slots, non_blocking=True)
    static.block_tables[: batch.num_seqs, : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)


class BucketedSteps:
    """``StepModel`` that replays captured steps for batches that fit a bucket, and runs the others as they are.

    Replays serve the cache of ``serve``, whose last block is the spare one: nobody else may be given it. Each shape is
    captured when it is first met; graphs that were used longest ago are dropped beyond some number. Where capturing
    fails, steps run as they are from then on.
    """

    def __init__(self, forward: Forward, capture: Capture) -> None:
        self._forward = forward
        self._capture = capture
        self._cache: KVCache | None = None
        self._graphs: OrderedDict[tuple[Key, tuple[int, ...]], tuple[Batch, Callable[[], None], torch.Tensor]] = (
            OrderedDict()
        )

    def serve(self, cache: KVCache) -> None:
        """Replay steps over this cache from now on."""
        self._cache = cache

    @property
    def num_graphs(self) -> int:
        """Captured steps that are kept."""
        return len(self._graphs)

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits ``[R, V]``, which the next call may overwrite unless they are taken from it; see ``StepModel``."""
        key = bucket_of(batch) if cache is self._cache else None
        if key is None:
            return self._forward(batch, cache)
        spare_block = cache.num_blocks - 1
        name = (key, () if batch.tap is None else batch.tap.layer_ids)
        graph = self._graphs.get(name)
        if graph is None:
            static = empty_batch(key, cache.device, spare_block)
            static.tap = None if batch.tap is None else HiddenTap(batch.tap.layer_ids)
            fill(static, batch, spare_block, cache.block_size)
            try:
                graph = (static, *self._capture(lambda: self._forward(static, cache)))
            except RuntimeError:
                _logger.exception("a step could not be captured: steps are launched kernel by kernel")
                self._cache = None
                return self._forward(batch, cache)
            self._graphs[name] = graph
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(name)
        static, replay, logits = graph
        fill(static, batch, spare_block, cache.block_size)
        replay()
        if batch.tap is not None and static.tap is not None and static.tap.states is not None:
            batch.tap.states = static.tap.states[: batch.input_ids.shape[0]].clone()  # the next replay overwrites them
        return logits.index_select(0, batch.logits_indices)


def cuda_capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Capture a CUDA graph, after two runs in which kernels are compiled and libraries set up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    return graph.replay, logits
