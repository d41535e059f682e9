"""What an engine is given: what computes its passes, and who observes them."""

from __future__ import annotations

from typing import Protocol

import torch

from specdec.engine.batch import Batch
from specdec.engine.scheduler import ScheduledItem
from specdec.engine.sequence import Sequence


class Runner(Protocol):
    """Forward passes over a paged cache, and copies inside that cache."""

    @property
    def device(self) -> torch.device:
        """Where batches have to be."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] float32 of ``batch.logits_indices``; writes the rows' keys and values."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), in order."""

    def copy_slots(self, src: list[int], dst: list[int]) -> None:
        """Copy physical slots in all layers; every source is read before any destination is written."""


class LaunchedPass(Protocol):
    """A forward pass that a device computes, or has computed."""

    def is_done(self) -> bool:
        """Whether it is over. Never waits."""

    def logits(self) -> torch.Tensor:
        """As `Runner.forward` gives them. On a device what reads them may be launched at once, and waits there.

        Raises what the pass has raised.
        """

    def gap_s(self) -> float | None:
        """From the end of the pass before to the begin of this one, on the device's clock: what it idled between two
        steps, and drew tokens. None: not known, or the pass has not begun. Never waits.
        """


class PassObserver:
    """Whoever has an engine step, told of each pass in this order. By itself it does nothing."""

    def pass_chosen(self, sequences: list[Sequence]) -> None:
        """The next pass is for these sequences; nothing is computed yet."""

    def blocks_copied(self, pairs: list[tuple[int, int]]) -> None:
        """The pass writes to copies of shared blocks, which were made: (source, destination), in order."""

    def pass_begins(self, items: list[ScheduledItem]) -> None:
        """The pass is computed next. Work that may go on meanwhile can be started on another thread."""
