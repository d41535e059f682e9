"""The engine's interfaces to a model, and to whoever observes its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from specdec.engine.batch import Batch
from specdec.engine.scheduler import ScheduledItem
from specdec.engine.sequence import Sequence

ResultT = TypeVar("ResultT")


class Runner(Protocol):
    """Forward passes over a paged cache, and copies inside that cache."""

    @property
    def device(self) -> torch.device:
        """Device of the batches."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] float32 of ``batch.logits_indices``; writes the rows' keys and values."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), in order."""

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy physical slots in all layers, as if all were read before any is written."""


class DeviceMemory(Protocol):
    """Memory of a device that can be given back."""

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""

    def release_memory(self) -> None:
        """Give back memory that only makes steps faster."""


class LaunchedPass(Protocol):
    """A forward pass on a device, running or done."""

    def is_done(self) -> bool:
        """Whether it is done. Never waits."""

    def logits(self) -> torch.Tensor:
        """Logits as of `Runner.forward`. On a device, kernels that read them may be launched at once.

        Raises the pass's error.
        """

    def behind(self, work: Callable[[torch.Tensor], ResultT]) -> Callable[[], ResultT]:
        """Launch work on the logits behind the pass, which is done only with it; `work` must not wait. The returned
        function gives what `work` returned, after `logits` was called.
        """

    def gap_s(self) -> float | None:
        """Seconds from the previous pass's end to this one's start, by the device's clock: idle time and sampling.
        None: not known, or not started. Never waits.
        """


class PassObserver:
    """Whoever has an engine step, told of each pass in this order. By itself it does nothing."""

    def pass_chosen(self, sequences: list[Sequence]) -> None:
        """The next pass is for these sequences; nothing is computed yet."""

    def blocks_copied(self, pairs: list[tuple[int, int]]) -> None:
        """The pass writes to copies of shared blocks, which were made: (source, destination), in order."""

    def pass_begins(self, items: list[ScheduledItem]) -> None:
        """The pass is computed next. Work that may go on meanwhile can be started on another thread."""
