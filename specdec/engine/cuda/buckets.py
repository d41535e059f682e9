"""Replayed steps of few rows: batches are padded to buckets of rows, so that nine captured shapes serve them all.

A replay costs one launch in place of about three hundred. A captured step has fixed tensors: a batch is copied into
them, and padded with rows of an extra sequence, which has a spare block of its own. Tables are as long as a sequence
may be: attention's programs follow a list of what there is to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.passes import CudaCapture, GraphCache, GraphStore
from specdec.engine.tap import HiddenTap

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PATH_SLOTS_PER_ROW = 16
"""Path slots per row that a captured step has room for, a power of two; deeper trees are not captured."""

KindT = TypeVar("KindT")
Forward = Callable[[Batch], torch.Tensor]


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


class PassShape(NamedTuple):
    """What captured passes of one model or head have in common."""

    num_blocks: int
    """Blocks of a captured table."""
    spare_block: int
    """Block that padding rows write to: no sequence may get it."""
    block_size: int
    device: torch.device

    @staticmethod
    def of(cache: KVCache, max_len: int | None) -> PassShape:
        """Of passes over a cache, whose last block is the spare one; ``max_len``: see ``table_blocks``."""
        most = cache.num_blocks if max_len is None else table_blocks(max_len, cache.block_size)
        return PassShape(min(cache.num_blocks, most), cache.num_blocks - 1, cache.block_size, cache.device)

    @property
    def spare_slot(self) -> int:
        """The first slot of the spare block."""
        return self.spare_block * self.block_size

    def empty_batch(self, num_rows: int) -> Batch:
        """A batch of padding only: every row is the first token of the last sequence, in the spare block."""

        def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        return Batch(
            input_ids=full(num_rows, dtype=torch.int64),
            position_ids=full(num_rows, dtype=torch.int64),
            slot_mapping=full(num_rows, value=self.spare_slot, dtype=torch.int64),
            row_seq=full(num_rows, value=num_rows - 1),
            context_lens=full(num_rows, value=1),
            path_offsets=full(num_rows + 1),
            path_slots=full(PATH_SLOTS_PER_ROW * num_rows),
            block_tables=full(num_rows, self.num_blocks, value=self.spare_block),
            logits_indices=torch.arange(num_rows, device=self.device),
            num_seqs=num_rows,
        )


def fill(static: Batch, batch: Batch, padding: Batch) -> None:
    """Copy ``batch`` into ``static``, a batch of its bucket, and pad the other rows as in ``padding``, an empty batch
    with as many rows. Four launches, without waiting.

    Table columns past the batch's own keep their old values, which no kernel reads.
    """
    names = (
        "input_ids", "position_ids", "slot_mapping", "row_seq", "context_lens", "path_offsets", "path_slots"
    )  # fmt: skip
    num_seqs, width = batch.block_tables.shape
    copies = [(static.block_tables[num_seqs:][-1:, :1], padding.block_tables[num_seqs:][-1:, :1])]
    for name in names:
        to, own, rest = (getattr(each, name) for each in (static, batch, padding))
        copies += [(to[: len(own)], own), (to[len(own) :], rest[len(own) :])]
    for dtype in (torch.int64, torch.int32):
        of_it = [(to, source) for to, source in copies if to.dtype == dtype and len(to)]
        torch._foreach_copy_([to for to, _ in of_it], [source for _, source in of_it])
    static.path_offsets[len(batch.path_offsets) :].fill_(len(batch.path_slots))
    static.block_tables[:num_seqs, :width].copy_(batch.block_tables)


class ReplayedPass(NamedTuple):
    """A captured pass."""

    batch: Batch
    """The batch whose tensors a replay reads, which it keeps alive."""
    padding: Batch
    """An empty batch, for `fill`."""
    inputs: tuple[torch.Tensor, ...]
    """Other tensors that a replay reads, a row for each of the batch's."""
    replay: Callable[[], None]
    result: torch.Tensor
    """What a replay fills; other replays overwrite it."""


class BucketedPasses(Generic[KindT]):
    """Passes of several kinds, captured for each bucket of rows at first use unless `prepare` did so."""

    def __init__(
        self,
        graphs: GraphCache,
        subject: str,
        shape: PassShape,
        make: Callable[[KindT, int], tuple[tuple[torch.Tensor, ...], Forward]],
        may_replay: Callable[[], bool] = lambda: True,
    ) -> None:
        """`make`: for a kind and a number of rows the tensors that a pass reads besides its batch, and the pass. It
        must not refer to this object: see ``GraphStore``."""
        self.store: GraphStore[tuple[KindT, int], ReplayedPass] = GraphStore(graphs, subject, may_replay)
        self._capture = graphs.capture
        self._shape = shape
        self._make = make

    def replayed(self, kind: KindT, batch: Batch | None, *inputs: torch.Tensor) -> ReplayedPass | None:
        """The pass after a replay for a batch and other inputs; None: it is not captured. Cost: four launches for a
        batch, and one for each input."""
        rows = row_bucket(len(inputs[0])) if batch is None else bucket_of(batch, self._shape.num_blocks)
        found = None if rows is None else self.store.get((kind, rows), self._captured)
        if found is None:
            return None
        if batch is not None:
            fill(found.batch, batch, found.padding)
        for static, own in zip(found.inputs, inputs, strict=True):
            static[: len(own)].copy_(own)
        found.replay()
        return found

    def prepare(self, keys: Iterable[tuple[KindT, int]], clock: Callable[[], float] = time.monotonic) -> None:
        """Capture kinds of passes for numbers of rows as time and memory allow."""
        self.store.prepare(keys, self._captured, clock)

    def _captured(self, key: tuple[KindT, int]) -> ReplayedPass:
        batch, padding = (shape.empty_batch(key[1]) for shape in (self._shape, self._shape._replace(num_blocks=1)))
        inputs, run = self._make(*key)
        return ReplayedPass(batch, padding, inputs, *self._capture(lambda: run(batch)))


class BucketedSteps:
    """``StepModel`` that replays captured steps for batches that fit a bucket, and runs other batches directly.

    Replays serve one cache, whose last block is the spare one: no sequence may get it. A step that ``prepare`` has not
    captured is captured at first use. All captured steps write their logits to one buffer.
    """

    def __init__(
        self,
        forward: Callable[[Batch, KVCache], torch.Tensor],
        cache: KVCache,
        capture: CudaCapture,
        max_len: int | None = None,
        *,
        is_alone: bool = True,
    ) -> None:
        """Replay steps over `cache` for sequences of at most ``max_len`` tokens; None: of any size. `is_alone`: see
        ``GraphCache``."""
        self.forward = forward
        """The function that runs a step directly."""
        self._cache = cache
        self._logits: torch.Tensor | None = None
        self.graphs = GraphCache(capture, is_alone=is_alone)
        """Captured steps, and graphs of what else runs over the model's results."""
        shape = PassShape.of(cache, max_len)
        self._passes: BucketedPasses[tuple[int, ...]] = BucketedPasses(self.graphs, "a step", shape, self._step)

    def stop(self) -> None:
        """Stop replaying, and drop all captured steps."""
        self._passes.store.refuse()

    @property
    def row_edges(self) -> tuple[int, ...]:
        """Row counts that steps are padded to, rising; larger steps are not replayed. Empty: no step is replayed."""
        return () if self._passes.store.has_failed else ROW_BUCKETS

    @property
    def num_graphs(self) -> int:
        """Number of captured steps."""
        return len(self._passes.store)

    def prepare(self, *, tap_ids: tuple[int, ...] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """Capture all steps, so that no request waits for captures: most rows first, whose memory others reuse.

        Args:
            tap_ids: layers whose hidden states the steps hand out.
            clock: monotonic time in seconds.
        """
        self._passes.prepare(((tap_ids, rows) for rows in reversed(ROW_BUCKETS)), clock)

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits ``[R, V]``, copied from those of a replay; see ``StepModel``."""
        tap_ids = () if batch.tap is None else batch.tap.layer_ids
        found = self._passes.replayed(tap_ids, batch) if cache is self._cache else None
        if found is None:
            return self.forward(batch, cache)
        tap = found.batch.tap
        if batch.tap is not None and tap is not None and tap.states is not None:
            batch.tap.states = tap.states[: batch.input_ids.shape[0]].clone()  # the next replay overwrites them
        return found.result.index_select(0, batch.logits_indices)

    def _step(self, tap_ids: tuple[int, ...], num_rows: int) -> tuple[tuple[torch.Tensor, ...], Forward]:
        def run(batch: Batch) -> torch.Tensor:
            batch.tap = HiddenTap(tap_ids) if tap_ids else None
            return self._buffered(self.forward(batch, self._cache))

        return (), run

    def _buffered(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in the buffer, which the first run of the first capture makes."""
        num_rows, num_logits = logits.shape
        if self._logits is None or self._logits.shape[1] != num_logits:
            self._logits = logits.new_empty(ROW_BUCKETS[-1], num_logits)
        return self._logits[:num_rows].copy_(logits)
