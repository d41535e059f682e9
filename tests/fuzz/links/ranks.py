"""Rank 0 to the others: frames whose sizes lie, that end early, or are none."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import torch

from specdec.engine.batch import Batch
from specdec.engine.parallel.frames import BadFrame, LeaderGone, StepFrame, StepKind, receive_frame
from specdec.engine.parallel.step_frames import batch_of, copies_frame, copies_of, forward_frame
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints, require

_HEADER_WORDS = 9
_NUMBERS = (0, 1, -1, 2, 3, 7, 8, 64, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_CPU = torch.device("cpu")
_PATIENCE_S = 10.0


def batch() -> Batch:
    """Five rows of two sequences, one of them a tree's."""
    return Batch(
        input_ids=torch.arange(5), position_ids=torch.arange(5), slot_mapping=torch.arange(5) + 16,
        row_seq=torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32),
        context_lens=torch.tensor([1, 2, 3, 4, 4], dtype=torch.int32),
        path_offsets=torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32),
        path_slots=torch.tensor([20], dtype=torch.int32),
        block_tables=torch.tensor([[1, 2, 3], [4, 0, 0]], dtype=torch.int32),
        logits_indices=torch.tensor([2, 4]), num_seqs=2,
    )  # fmt: skip


def follow(data: bytes) -> list[Batch | tuple[list[int], list[int]]]:
    """What a following rank makes of bytes after which rank 0 is gone. Raises BadFrame or LeaderGone."""
    here, there = socket.socketpair()
    made: list[Batch | tuple[list[int], list[int]]] = []
    with closing(here), closing(there):
        there.settimeout(_PATIENCE_S)
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        while (frame := receive_frame(there)).kind is not StepKind.STOP:
            made.append(batch_of(frame, _CPU) if frame.kind is StepKind.FORWARD else copies_of(frame))
    return made


def spoilt(rng: random.Random, case: Case, frame: StepFrame) -> bytes:
    """A frame with another number in its header, one that ends early, or noise in its place."""
    data = bytearray(frame.encode())
    if rng.random() < 0.7:
        word, number = rng.randrange(_HEADER_WORDS), rng.choice(_NUMBERS)
        struct.pack_into("<q", data, 8 * word, number)
        case.what.append(f"{frame.kind.name}: word {word} = {number}")
        return case.sent(bytes(data))
    if rng.random() < 0.5:
        case.what.append(f"{frame.kind.name} cut")
        return case.sent(bytes(data[: rng.randrange(len(data))]))
    case.what.append("noise")
    return case.sent(rng.randbytes(rng.randrange(300)))


def _changed(rng: random.Random, case: Case) -> bytes:
    kind = rng.choice([StepKind.COPY_BLOCKS, StepKind.COPY_SLOTS])
    return spoilt(rng, case, rng.choice([forward_frame(batch()), copies_frame(kind, [1, 2, 3], [4, 5, 6])]))


def check_good() -> None:
    """A right frame is read as it was sent. Raises Fault."""
    (read,) = follow(forward_frame(batch()).encode() + StepFrame(StepKind.STOP, (), bytearray()).encode())
    assert isinstance(read, Batch)
    sent = batch()
    for name in ("input_ids", "slot_mapping", "row_seq", "path_slots", "block_tables", "logits_indices"):
        require(torch.equal(getattr(read, name), getattr(sent, name)), f"{name} is {getattr(read, name)}")


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """The reading end of a rank."""

    async def run(case: Case) -> None:
        try:
            for read in follow(_changed(case.rng, case)):
                if isinstance(read, Batch):
                    rows = read.input_ids.shape[0]
                    require(read.path_offsets.shape[0] == rows + 1, "offsets of other rows")
                    require(read.block_tables.shape[0] == read.num_seqs, "tables of other sequences")
                else:
                    require(len(read[0]) == len(read[1]), "sources without targets")
        except (BadFrame, LeaderGone):
            pass
        check_good()

    yield run


LINK = Link("ranks", opened)
