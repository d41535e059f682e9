"""A device that plays a GPU in this process: passes are launched, computed later, and padded to buckets.

A real runner on the CPU computes the passes in the order of the calls, as in a stream. The test decides the time of
computing: after a number of looks at the pass, on a thread of its own, or when its logits are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specdec.engine.batch import Batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.runner import ResultT, Runner
from specdec.engine.scheduler import Scheduler
from tests.support.engine.exact_runner import ExactRunner
from tests.support.engine.free_rows import FreeRows
from tests.support.engine.local_pair import LocalPair

MOST_ROWS = 128
"""Rows of the largest batch that is padded."""


class LatePass:
    """A launched pass: see `specdec.engine.runner.LaunchedPass`."""

    def __init__(self, compute: Callable[[], torch.Tensor], num_looks: int, on_look: Callable[[], None]) -> None:
        """The pass is computed after `num_looks` looks, or when its logits are asked for; each look calls `on_look`."""
        self.is_computed = self.is_asked_for = False
        self._compute = compute
        self._num_looks = num_looks
        self._on_look = on_look
        self._logits: torch.Tensor | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Compute on a thread from now on."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether it is computed."""
        self._on_look()
        if self._thread is None and self._num_looks == 0:
            self.finish()
        self._num_looks -= 1
        return self.is_computed

    def finish(self) -> None:
        """Wait until it is computed."""
        if self._thread is not None:
            self._thread.join()
        elif not self.is_computed:
            self._run()

    def logits(self) -> torch.Tensor:
        """Logits of the pass, once it is computed. Raises the error of computing it."""
        self.finish()
        self.is_asked_for = True
        if self._error is not None:
            raise self._error
        assert self._logits is not None
        return self._logits

    def behind(self, work: Callable[[torch.Tensor], ResultT]) -> Callable[[], ResultT]:
        """Work that is done after the pass, when its result is asked for."""
        return lambda: work(self.logits())

    def gap_s(self) -> float | None:
        """One millisecond."""
        return 1e-3

    def _run(self) -> None:
        try:
            self._logits = self._compute()
        except Exception as error:
            self._error = error
        self.is_computed = True


class LateDevice:
    """A runner whose passes are launched (`Engine.launch_pass`), over one that computes them.

    Assertions fail when a pass's blocks are freed before it is computed, and when a pass is launched before its
    predecessor's logits were asked for.
    """

    def __init__(self, runner: Runner, pool: BlockPool, num_spare_blocks: int) -> None:
        """`pool` is the engine's; the runner's cache has `num_spare_blocks` more blocks, for rows of padding."""
        self.device = runner.device
        self.num_looks: Callable[[], int] = lambda: 2
        """Looks at the next pass before it is computed."""
        self.is_threaded = False
        self.meanwhile: Callable[[], None] = lambda: None
        """Called once for each pass, at the first look: acts while the pass is computed."""
        self.before_compute: Callable[[Batch], None] = lambda batch: None
        """Called with each batch before it is computed; may raise."""
        self.num_launched = self.num_padded = 0
        self._runner = runner
        self._pool = pool
        self._num_spare_blocks = num_spare_blocks
        self._stream: list[LatePass] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a padded batch at once."""
        self._drain()
        return self._compute(batch)

    def launch(self, batch: Batch) -> LatePass:
        """Launch a pass behind the earlier ones."""
        assert all(each.is_asked_for for each in self._stream), "the pass before was not collected"
        self._drain()
        looked_at: list[bool] = []

        def on_look() -> None:
            if not looked_at:
                looked_at.append(True)
                self.meanwhile()

        launched = LatePass(lambda: self._compute(batch), self.num_looks(), on_look)
        self._stream = [launched]
        self.num_launched += 1
        if self.is_threaded:
            launched.start()
        return launched

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks after the launched passes."""
        self._drain()
        self._runner.copy_blocks(pairs)

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy slots after the launched passes."""
        self._drain()
        self._runner.copy_slots(src, dst)

    def _drain(self) -> None:
        for each in self._stream:
            each.finish()

    def _compute(self, batch: Batch) -> torch.Tensor:
        for block in {*(batch.slot_mapping // self._pool.block_size).tolist()}:
            assert self._pool._ref_counts[block] > 0, f"block {block} was given back before it was written"
        self.before_compute(batch)
        return self._runner.forward(self._padded(batch))

    def _padded(self, batch: Batch) -> Batch:
        """The batch, padded to the next power of two by rows of one more sequence in the spare blocks."""
        num_rows, num_seqs = len(batch.input_ids), batch.num_seqs
        num_more = (1 << (num_rows - 1).bit_length()) - num_rows
        if not num_more or num_rows + num_more > MOST_ROWS:
            return batch
        self.num_padded += 1
        size, first = self._pool.block_size, self._pool.num_blocks
        num_blocks = -(-num_more // size)
        assert num_blocks <= self._num_spare_blocks
        tables = torch.zeros(num_seqs + 1, max(num_blocks, batch.block_tables.shape[1]), dtype=torch.int32)
        tables[:num_seqs, : batch.block_tables.shape[1]] = batch.block_tables
        tables[num_seqs, :num_blocks] = torch.arange(first, first + num_blocks)
        positions = torch.arange(num_more)
        return replace(
            batch,
            input_ids=torch.cat([batch.input_ids, torch.zeros(num_more, dtype=torch.int64)]),
            position_ids=torch.cat([batch.position_ids, positions]),
            slot_mapping=torch.cat([batch.slot_mapping, first * size + positions]),
            row_seq=torch.cat([batch.row_seq, torch.full((num_more,), num_seqs, dtype=torch.int32)]),
            context_lens=torch.cat([batch.context_lens, (positions + 1).int()]),
            path_offsets=torch.cat([batch.path_offsets, batch.path_offsets[-1:].expand(num_more)]),
            block_tables=tables,
            num_seqs=num_seqs + 1,
        )


def late_engine(
    runner: Any, num_blocks: int, block_size: int, limits: tuple[int, int, int]
) -> tuple[Engine, LateDevice]:
    """An engine over a late device, with `num_blocks` of the runner's blocks; `limits` are those of `Scheduler`."""
    pool = BlockPool(num_blocks, block_size)
    device = LateDevice(runner, pool, runner.num_blocks - num_blocks)
    return Engine(device, pool, Scheduler(pool, *limits), device.launch), device


def late_exact_engine(
    num_blocks: int = 32,
    block_size: int = 4,
    max_batch_tokens: int = 64,
    max_batch_seqs: int = 8,
    max_model_len: int = 96,
) -> tuple[Engine, LateDevice]:
    """`exact_runner.make_engine` over a late device."""
    num_spare = -(-MOST_ROWS // block_size)
    runner = ExactRunner(num_blocks + num_spare, block_size)
    runner.num_blocks = num_blocks + num_spare  # type: ignore[attr-defined]
    return late_engine(runner, num_blocks, block_size, (max_batch_tokens, max_batch_seqs, max_model_len))


def put_on_late_device(pair: LocalPair, num_blocks: int) -> LateDevice:
    """Give a pair's target an engine over a late device, with `num_blocks` of its model's blocks."""
    built = pair.target_built
    scheduler = built.engine.scheduler
    limits = scheduler.max_batch_tokens, scheduler.max_batch_seqs, scheduler.max_model_len
    engine, device = late_engine(built.engine.runner, num_blocks, built.engine.block_pool.block_size, limits)
    pair.target_built = replace(built, engine=engine)
    pair.reset()
    return device


def unhurried() -> FreeRows:
    """A cost model with long steps, so that messages that arrive during a step are processed before its results."""
    step_time = FreeRows()
    step_time.base_s = 1000.0
    return step_time
