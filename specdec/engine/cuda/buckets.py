"""Replayed steps of few rows: batches are padded to buckets of rows, so that nine captured shapes serve them all.

A replay costs one launch in place of about three hundred. A captured step has fixed tensors: a batch is copied into
them, and padded with rows of an extra sequence, which has a spare block of its own. Tables are as long as a sequence
may be: attention's programs follow a list of what there is to do.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.passes import CudaCapture
from specdec.engine.errors import is_out_of_memory
from specdec.engine.tap import HiddenTap

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PATH_SLOTS_PER_ROW = 16
"""Path slots per row that a captured step has room for, a power of two; deeper trees are not captured."""
_MOST_GRAPHS = 64
"""Captured graphs of one kind of passes: steps, drawn tokens, or those of a head."""
_MOST_FAILURES = 3
"""Failed captures after which none is tried."""
_logger = logging.getLogger(__name__)

KindT = TypeVar("KindT")
Forward = Callable[[Batch], torch.Tensor]


def bucket_of(batch: Batch, num_blocks: int) -> int | None:
    """Rows of the captured step that serves a batch; None: no bucket fits. ``num_blocks``: of a captured table."""
    rows = row_bucket(batch.input_ids.shape[0]) or 0
    fits = len(batch.path_slots) <= PATH_SLOTS_PER_ROW * rows and batch.block_tables.shape[1] <= num_blocks
    return rows if rows and fits else None


def row_bucket(num_rows: int) -> int | None:
    """Number of rows that a step is padded to; None: it is too large for a captured step."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= num_rows), None)


def table_blocks(max_len: int, block_size: int) -> int:
    """Blocks of a captured table: for sequences of ``max_len`` tokens with the nodes of a tree behind them."""
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
    num_seqs, width = batch.block_tables.shape
    copies = [(static.block_tables[num_seqs:][-1:, :1], padding.block_tables[num_seqs:][-1:, :1])]
    for name in ("input_ids", "position_ids", "slot_mapping", "row_seq", "context_lens", "path_offsets", "path_slots"):
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
    """Other tensors that a replay uses, which it keeps alive."""
    replay: Callable[[], None]
    result: torch.Tensor
    """What a replay fills; other replays overwrite it."""

    def take(self, batch: Batch | None, *inputs: torch.Tensor) -> None:
        """Copy a batch and the first lines of the first inputs to where a replay reads them, in inference mode. Cost:
        four launches for a batch, and one for each input."""
        if batch is not None:
            fill(self.batch, batch, self.padding)
        for static, own in zip(self.inputs, inputs, strict=False):
            static[: len(own)].copy_(own, non_blocking=True)


class BucketedPasses(Generic[KindT]):
    """Passes of several kinds, captured for each bucket of rows at first use unless `capture_ahead` did so.

    The least recently used one is dropped first. A pass is None, so that its kernels are launched one by one, where its
    capture fails, after three such failures, while there is no memory for another graph, and while none may be
    replayed.
    """

    def __init__(
        self, capture: CudaCapture, subject: str, shape: PassShape, may_replay: Callable[[], bool] = lambda: True
    ) -> None:
        """`capture`: shared with other passes; `subject`: name of these in logs; `shape`: of all of them;
        `may_replay`: called by each `get`."""
        self.capture = capture
        self.shape = shape
        self._subject = subject
        self._may_replay = may_replay
        self._graphs: OrderedDict[tuple[KindT, int], ReplayedPass] = OrderedDict()
        self._num_failures = 0
        capture.stores.add(self)

    @abstractmethod
    def made(self, kind: KindT, num_rows: int) -> tuple[tuple[torch.Tensor, ...], Forward]:
        """For a kind and a number of rows the tensors that a pass reads besides its batch, and the pass."""

    @torch.inference_mode()
    def replayed(self, kind: KindT, batch: Batch | None, *inputs: torch.Tensor) -> ReplayedPass | None:
        """The pass after a replay for a batch and other inputs, which have a line for each row; None: it is not
        captured. Cost: see ``ReplayedPass.take``."""
        rows = row_bucket(len(inputs[0])) if batch is None else bucket_of(batch, self.shape.num_blocks)
        found = None if rows is None else self.get((kind, rows))
        if found is not None:
            found.take(batch, *inputs)
            found.replay()
        return found

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    @property
    def has_failed(self) -> bool:
        """Whether no graph is captured or replayed any more."""
        return self._num_failures >= _MOST_FAILURES

    def get(self, key: tuple[KindT, int]) -> ReplayedPass | None:
        """The pass of a kind and a number of rows, captured now if it is missing; None: see the class."""
        if self.has_failed or not self._may_replay():
            return None
        if key not in self._graphs:
            if not self.capture.has_memory():
                return None
            try:
                self._graphs[key] = self.captured(key)
            except RuntimeError as error:
                if not self.capture.is_alone:
                    raise
                self._num_failures += 1
                _logger.exception(f"{self._subject} could not be captured; its kernels are launched one by one")
                if is_out_of_memory(error):
                    self.capture.drop()
                if self.has_failed:
                    self.drop(for_good=True)
                return None
        self._graphs.move_to_end(key)
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return self._graphs[key]

    def capture_ahead(self, keys: Iterable[tuple[KindT, int]], clock: Callable[[], float] = time.monotonic) -> None:
        """Capture graphs before the first request until one fails, or time or memory is used up."""
        began_s, capture = clock(), self.capture
        is_complete = all(capture.has_room(clock() - began_s) and self.get(key) is not None for key in keys)
        elapsed_s = clock() - began_s
        capture.ahead_s += elapsed_s
        figures = {"num": self.num_graphs, "seconds": round(elapsed_s, 3), "complete": is_complete}
        _logger.info("graphs_captured", extra={"subject": self._subject, **figures})

    def drop(self, *, for_good: bool = False) -> None:
        """Drop all graphs; ``for_good``: and replay nothing from now on."""
        self._num_failures += _MOST_FAILURES * for_good
        self._graphs.clear()

    @torch.inference_mode()
    def captured(self, key: tuple[KindT, int]) -> ReplayedPass:
        """Capture a pass, to be used in inference mode. It does not refer to these, or an exchanged head would stay."""
        batch, padding = (shape.empty_batch(key[1]) for shape in (self.shape, self.shape._replace(num_blocks=1)))
        inputs, run = self.made(*key)
        return ReplayedPass(batch, padding, inputs, *self.capture(lambda: run(batch)))


class BucketedSteps(BucketedPasses[tuple[int, ...]]):
    """``StepModel`` that replays captured steps for batches that fit a bucket, and runs other batches directly.

    Replays serve one cache, whose last block is the spare one: no sequence may get it. A step's kind is its tap's
    layers. All captured steps write their logits to one buffer.
    """

    def __init__(
        self,
        forward: Callable[[Batch, KVCache], torch.Tensor],
        cache: KVCache,
        capture: CudaCapture,
        max_len: int | None = None,
    ) -> None:
        """Replay steps over `cache` for sequences of at most ``max_len`` tokens; None: of any size."""
        super().__init__(capture, "a step", PassShape.of(cache, max_len))
        self.forward = forward
        """The function that runs a step directly."""
        self.cache = cache
        self._logits: torch.Tensor | None = None

    @property
    def row_edges(self) -> tuple[int, ...]:
        """Row counts that steps are padded to, rising; larger steps are not replayed. Empty: no step is replayed."""
        return () if self.has_failed else ROW_BUCKETS

    def prepare(self, *, tap_ids: tuple[int, ...] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """Capture all steps that hand out these layers' hidden states, so that no request waits for captures: most rows
        first, whose memory others reuse."""
        self.capture_ahead(((tap_ids, rows) for rows in reversed(ROW_BUCKETS)), clock)

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Logits ``[R, V]``, copied from those of a replay; see ``StepModel``."""
        tap_ids = () if batch.tap is None else batch.tap.layer_ids
        found = self.replayed(tap_ids, batch) if cache is self.cache else None
        if found is None:
            return self.forward(batch, cache)
        tap = found.batch.tap
        if batch.tap is not None and tap is not None and tap.states is not None:
            batch.tap.states = tap.states[: batch.input_ids.shape[0]].clone()  # the next replay overwrites them
        return found.result.index_select(0, batch.logits_indices)

    def made(self, kind: tuple[int, ...], num_rows: int) -> tuple[tuple[torch.Tensor, ...], Forward]:
        """See ``BucketedPasses``."""

        def run(batch: Batch) -> torch.Tensor:
            batch.tap = HiddenTap(kind) if kind else None
            logits = self.forward(batch, self.cache)
            if self._logits is None or self._logits.shape[1] != logits.shape[1]:  # of the first run
                self._logits = logits.new_empty(ROW_BUCKETS[-1], logits.shape[1])
            return self._logits[:num_rows].copy_(logits)

        return (), run
