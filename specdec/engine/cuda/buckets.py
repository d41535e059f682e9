"""Replayed steps of few rows: batches are padded to buckets of rows, so that nine captured shapes serve them all.

A replay costs one launch in place of about three hundred. A captured step has fixed tensors: a batch is copied into
them, and padded with rows of an extra sequence, which has a spare block of its own. Tables are as long as a sequence
may be: attention's programs follow a list of what there is to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.bucket_kernels import advance_kernel, fill_kernel
from specdec.engine.cuda.launch import launch
from specdec.engine.cuda.passes import Capture, GraphCache, GraphStore
from specdec.engine.tap import HiddenTap

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PATH_SLOTS_PER_ROW = 16
"""Path slots per row that a captured step has room for, a power of two; deeper trees are not captured."""

Forward = Callable[[Batch, KVCache], torch.Tensor]
_GraphKey = tuple[int, tuple[int, ...]]
"""Rows, and the layer ids of a step's tap."""


def bucket_of(batch: Batch, num_blocks: int) -> int | None:
    """Rows of the captured step that serves a batch; None: no bucket fits. ``num_blocks``: of a captured table."""
    rows = row_bucket(batch.input_ids.shape[0])
    if (
        rows is None
        or batch.path_slots.shape[0] > PATH_SLOTS_PER_ROW * rows
        or batch.block_tables.shape[1] > num_blocks
    ):
        return None
    return rows


def row_bucket(num_rows: int) -> int | None:
    """Number of rows that a step is padded to; None: it is too large for a captured step."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= num_rows), None)


def table_blocks(max_len: int, block_size: int) -> int:
    """Blocks of a captured table: for sequences of ``max_len`` tokens, with the nodes of a tree in blocks of their
    own."""
    return -(-(max_len + ROW_BUCKETS[-1]) // block_size)


def empty_batch(num_rows: int, num_blocks: int, device: torch.device, spare_block: int, block_size: int) -> Batch:
    """A batch of padding only: every row is the first token of the last sequence, in the spare block.

    ``num_blocks``: of a row's table.
    """

    def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return Batch(
        input_ids=full(num_rows, dtype=torch.int64),
        position_ids=full(num_rows, dtype=torch.int64),
        slot_mapping=full(num_rows, value=spare_block * block_size, dtype=torch.int64),
        row_seq=full(num_rows, value=num_rows - 1),
        context_lens=full(num_rows, value=1),
        path_offsets=full(num_rows + 1),
        path_slots=full(PATH_SLOTS_PER_ROW * num_rows),
        block_tables=full(num_rows, num_blocks, value=spare_block),
        logits_indices=torch.arange(num_rows, device=device),
        num_seqs=num_rows,
    )


def fill(static: Batch, batch: Batch, spare_block: int, block_size: int) -> None:
    """Copy ``batch`` into ``static``, a batch of its bucket, and pad the other rows. One launch, without waiting.

    Table columns past the batch's own keep their old values, which no kernel reads.
    """
    num_rows = static.input_ids.shape[0]
    names = (
        "input_ids", "position_ids", "slot_mapping", "row_seq", "context_lens", "path_offsets", "path_slots",
        "block_tables",
    )  # fmt: skip
    launch(
        fill_kernel,
        (num_rows + 1,),
        *(getattr(batch, name) for name in names),
        *(getattr(static, name) for name in names),
        batch.input_ids.shape[0],
        batch.num_seqs,
        batch.path_slots.shape[0],
        batch.block_tables.shape[1],
        num_rows,
        static.block_tables.shape[1],
        spare_block,
        SLOTS_PER_ROW=PATH_SLOTS_PER_ROW,
        BLOCK_SIZE=block_size,
        BLOCK=1024,
        options={"num_warps": 4},
    )


def advance(
    batch: Batch, number: int, drawn: torch.Tensor, positions: torch.Tensor, num_passes: torch.Tensor, cache: KVCache
) -> None:
    """Change a batch, in place, to the pass over the tokens that a round has drawn. One launch.

    Args:
        batch: a row for each sequence, in order.
        number: number of the round, from 0 on.
        drawn: ``[rows, 2, num_top]`` int32, as ``launch_top`` returns it.
        positions: ``[rows]`` int32, positions of the tokens of round 0.
        num_passes: ``[rows]`` int32; a row with at most ``number`` passes writes to the spare block, the cache's last.
        cache: KV cache of the batch.
    """
    launch(
        advance_kernel,
        (drawn.shape[0],),
        drawn,
        positions,
        num_passes,
        batch.block_tables,
        batch.input_ids,
        batch.position_ids,
        batch.slot_mapping,
        batch.context_lens,
        number,
        drawn.shape[2],
        batch.block_tables.shape[1],
        cache.num_blocks - 1,
        BLOCK_SIZE=cache.block_size,
        options={"num_warps": 1},
    )


class _Graph(NamedTuple):
    batch: Batch
    """The batch whose tensors a replay reads, which it keeps alive."""
    replay: Callable[[], None]
    logits: torch.Tensor
    """Rows of the buffer."""


class BucketedSteps:
    """``StepModel`` that replays captured steps for batches that fit a bucket, and runs other batches directly.

    Replays serve the cache given to ``serve``, whose last block is the spare one: no sequence may get it. A step that
    ``prepare`` has not captured is captured at first use. All captured steps write their logits to one buffer.
    """

    def __init__(self, forward: Forward, capture: Capture, *, is_alone: bool = True) -> None:
        """`is_alone`: see ``GraphCache``."""
        self._forward = forward
        self._cache: KVCache | None = None
        self._num_blocks = 0
        self._logits: torch.Tensor | None = None
        self.graphs = GraphCache(capture, is_alone=is_alone)
        """Captured steps, and graphs of what else runs over the model's results."""
        self._steps: GraphStore[_GraphKey, _Graph] = GraphStore(self.graphs, "a step")

    def serve(self, cache: KVCache, max_len: int | None = None) -> None:
        """Replay steps over this cache from now on, for sequences of at most ``max_len`` tokens; None: of any size."""
        self._cache = cache
        self._num_blocks = cache.num_blocks
        if max_len is not None:
            self._num_blocks = min(cache.num_blocks, table_blocks(max_len, cache.block_size))

    def stop(self) -> None:
        """Stop replaying, and drop all captured steps."""
        self._cache = None
        self._steps.clear()

    @property
    def row_edges(self) -> tuple[int, ...]:
        """Row counts that steps are padded to, rising; larger steps are not replayed. Empty: no step is replayed."""
        return () if self._cache is None or self._steps.has_failed else ROW_BUCKETS

    @property
    def forward(self) -> Forward:
        """The function that runs a step directly."""
        return self._forward

    @property
    def num_graphs(self) -> int:
        """Number of captured steps."""
        return len(self._steps)

    def prepare(self, *, tap_ids: tuple[int, ...] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """Capture all steps, so that no request waits for captures: most rows first, whose memory others reuse.

        Args:
            tap_ids: layers whose hidden states the steps hand out.
            clock: monotonic time in seconds.
        """
        if (cache := self._cache) is not None:
            keys = ((rows, tap_ids) for rows in reversed(ROW_BUCKETS))
            self._steps.prepare(keys, lambda key: self._captured(key, cache), clock)

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits ``[R, V]``, copied from those of a replay; see ``StepModel``."""
        graph = self._graph_of(batch, cache) if cache is self._cache and not self._steps.has_failed else None
        if graph is None:
            return self._forward(batch, cache)
        static = graph.batch
        fill(static, batch, cache.num_blocks - 1, cache.block_size)
        graph.replay()
        if batch.tap is not None and static.tap is not None and static.tap.states is not None:
            batch.tap.states = static.tap.states[: batch.input_ids.shape[0]].clone()  # the next replay overwrites them
        return graph.logits.index_select(0, batch.logits_indices)

    def _graph_of(self, batch: Batch, cache: KVCache) -> _Graph | None:
        bucket, tap_ids = bucket_of(batch, self._num_blocks), () if batch.tap is None else batch.tap.layer_ids
        return None if bucket is None else self._steps.get((bucket, tap_ids), lambda key: self._captured(key, cache))

    def _captured(self, key: _GraphKey, cache: KVCache) -> _Graph:
        num_rows, tap_ids = key
        static = empty_batch(num_rows, self._num_blocks, cache.device, cache.num_blocks - 1, cache.block_size)
        static.tap = HiddenTap(tap_ids) if tap_ids else None
        return _Graph(static, *self.graphs.capture(lambda: self._buffered(self._forward(static, cache))))

    def _buffered(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in the buffer, which the first run of the first capture makes."""
        num_rows, num_logits = logits.shape
        if self._logits is None or self._logits.shape[1] != num_logits:
            self._logits = logits.new_empty(ROW_BUCKETS[-1], num_logits)
        return self._logits[:num_rows].copy_(logits)
