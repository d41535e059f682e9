"""Runs every pass on all ranks: rank 0 sends, the others follow."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.engine.batch import Batch
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.frames import BadFrame, StepFrame, StepKind, receive_frame
from specdec.engine.parallel.step_frames import batch_of, copies_frame, copies_of, forward_frame
from specdec.engine.runner import LaunchedPass

Mark = Callable[[int], None]
"""Takes twice the number of steps that a rank has launched, copies counted, and one more while it launches another."""


class LeadingRunner:
    """The runner of rank 0, as the engine sees it (``specdec.engine.engine.Runner``).

    A call returns when this rank is done; the others may be some frames behind. Sending costs one copy of the batch and
    one system call per rank.

    Raises ``OSError`` if a rank is gone or does not read within its connection's timeout.
    """

    def __init__(
        self, runner: ModelRunner, followers: Sequence[socket.socket], mark: Mark = lambda steps: None
    ) -> None:
        self.device = torch.device("cpu")  # batches are sent from the CPU, also to this rank's device
        self._runner = runner
        self._followers = tuple(followers)
        self._mark = mark
        self._num_sent = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelRunner.forward``."""
        logits = self._runner.forward(self._sent(batch))
        self._mark(2 * self._num_sent)
        return logits

    def launch(self, batch: Batch) -> LaunchedPass:
        """See ``ModelRunner.launch``. Does not wait for the other ranks."""
        launched = self._runner.launch(self._sent(batch))
        self._mark(2 * self._num_sent)
        return launched

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.copy_blocks``."""
        self._send(copies_frame(StepKind.COPY_BLOCKS, [source for source, _ in pairs], [to for _, to in pairs]))
        self._runner.copy_blocks(pairs)
        self._mark(2 * self._num_sent)

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """See ``ModelRunner.copy_slots``."""
        self._send(copies_frame(StepKind.COPY_SLOTS, src, dst))
        self._runner.copy_slots(src, dst)
        self._mark(2 * self._num_sent)

    def _sent(self, batch: Batch) -> Batch:
        """Send the batch to the other ranks; returns it on this rank's device."""
        if self._runner.device.type == "cpu":
            # All ranks have the same residual stream, so only this one taps it.
            self._send(forward_frame(replace(batch, tap=None)))
            return batch
        # Taps are a part of captured steps. All ranks must capture at the same time, as a capture runs its collectives
        # more than once.
        frame = forward_frame(batch)
        self._send(frame)
        tap = batch.tap
        batch = batch_of(frame, self._runner.device)
        batch.tap = tap
        return batch

    def _send(self, frame: StepFrame) -> None:
        self._num_sent += 1
        self._mark(2 * self._num_sent - 1)
        data = frame.encode()
        for follower in self._followers:
            follower.sendall(data)


def follow(runner: ModelRunner, connection: socket.socket, mark: Mark = lambda steps: None) -> None:
    """Run what rank 0 sends until it says stop. Raises ``LeaderGone`` if its connection ends."""
    for num_launched in itertools.count():
        mark(2 * num_launched)
        frame = receive_frame(connection)
        mark(2 * num_launched + 1)
        match frame.kind:
            case StepKind.FORWARD:
                runner.forward(batch_of(frame, runner.device))
            case StepKind.COPY_BLOCKS:
                runner.copy_blocks(list(zip(*copies_of(frame), strict=True)))
            case StepKind.COPY_SLOTS:
                runner.copy_slots(*copies_of(frame))
            case StepKind.STOP:
                return
            case _:
                raise BadFrame(f"a {frame.kind.name} frame among steps")
