"""Runs every pass on all ranks: rank 0 sends, the others follow."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.engine.batch import Batch
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.frames import BadFrame, StepFrame, StepKind, receive_frame
from specdec.engine.parallel.step_frames import batch_of, copies_frame, copies_of, forward_frame
from specdec.engine.runner import LaunchedPass


class LeadingRunner:
    """The runner of rank 0, as the engine sees it (``specdec.engine.engine.Runner``).

    A call returns when this rank is done; the others may be some frames behind. Sending costs one copy of the batch and
    one system call per rank.

    Raises ``OSError`` if a rank is gone or does not read within its connection's timeout.
    """

    def __init__(self, runner: ModelRunner, followers: Sequence[socket.socket]) -> None:
        self.device = torch.device("cpu")  # batches are sent from the CPU, also to this rank's device
        self._runner = runner
        self._followers = tuple(followers)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelRunner.forward``."""
        return self._runner.forward(self._sent(batch))

    def launch(self, batch: Batch) -> LaunchedPass:
        """See ``ModelRunner.launch``. Does not wait for the other ranks."""
        return self._runner.launch(self._sent(batch))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``ModelRunner.copy_blocks``."""
        self._send(copies_frame(StepKind.COPY_BLOCKS, [source for source, _ in pairs], [to for _, to in pairs]))
        self._runner.copy_blocks(pairs)

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """See ``ModelRunner.copy_slots``."""
        self._send(copies_frame(StepKind.COPY_SLOTS, src, dst))
        self._runner.copy_slots(src, dst)

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
        data = frame.encode()
        for follower in self._followers:
            follower.sendall(data)


def follow(runner: ModelRunner, connection: socket.socket) -> None:
    """Run what rank 0 sends until it says stop. Raises ``LeaderGone`` if its connection ends."""
    while True:
        frame = receive_frame(connection)
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
