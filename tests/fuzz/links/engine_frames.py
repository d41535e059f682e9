"""Servicer to engine: frames of every kind, for streams that there are and that there are not, a real engine below."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec.replica.bridge.frames import Frame, FrameKind
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints
from tests.fuzz.links.worker import BAD_STREAM, SIDES, Worker

_NOT_TRIED = (FrameKind.SHUTDOWN, FrameKind.DRAIN)
"""Orders, whatever comes with them."""
_STREAMS = (0, BAD_STREAM, BAD_STREAM, BAD_STREAM, 77, 2**32 - 1)
_PAYLOADS = (b"", b"\0", b"\xff" * 8, b"\xff" * 9, b"\xff" * 5000, b"\0" * 70_000, "é".encode(), b"\x0a\x00")


def _frames(rng: random.Random, case: Case) -> list[Frame]:
    kinds = [kind for kind in FrameKind if kind not in _NOT_TRIED]
    conversation = [message.SerializeToString() for message in SIDES["target"].conversation(rng)]
    frames = [Frame(FrameKind.MESSAGE, BAD_STREAM, message) for message in conversation]
    for _ in range(rng.choice([1, 1, 4])):
        payload = rng.choice(_PAYLOADS) if rng.random() < 0.8 else rng.choice(conversation)
        frame = Frame(rng.choice(kinds), rng.choice(_STREAMS), case.sent(payload))
        case.what.append(f"{frame.kind.name} of {frame.stream_id} with {payload[:20]!r} of {len(payload)} bytes")
        frames.insert(rng.randrange(len(frames) + 1), frame)
    return frames


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """The loop of a target's engine, with a good session and whatever frames come beside it."""
    worker = Worker(SIDES["target"])

    async def run(case: Case) -> None:
        worker.try_frames(_frames(case.rng, case))

    yield run
    worker.check_good()


LINK = Link("servicer-engine", opened)
