"""A client as a process: `python client_main.py ADDRESS`, which `client_process.py` controls line by line.

It is run by its path, so that it imports its environment's specdec, and of that only what clients import.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from specdec import __version__
from specdec.client import Client, ClientSettings, Completion, generate_resuming
from specdec.v1 import coordinator_pb2 as api

NUM_BEFORE = 20
"""Tokens after which each stream pauses until an empty line is read."""


@dataclass(frozen=True, kw_only=True)
class SmallBuffers(ClientSettings):
    """Settings of a connection that buffers few unread bytes."""

    def channel_options(self) -> list[tuple[str, str | int]]:
        return [*super().channel_options(), ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


class Streams:
    """Runs all requests at once; writes a line when all have begun, then each answer in the requests' order."""

    def __init__(self, num: int) -> None:
        self._num_to_begin = num
        self._may_go_on = asyncio.Event()

    async def run(self, client: Client, bodies: list[api.GenerateRequest]) -> None:
        """Send the requests, pause, continue, and write the answers."""
        tasks = [asyncio.create_task(self._collect(client, body)) for body in bodies]
        await asyncio.to_thread(sys.stdin.readline)
        self._may_go_on.set()
        for completion in await asyncio.gather(*tasks):
            write({"chunks": [base64.b64encode(c.SerializeToString()).decode() for c in chunks_of(completion)]})

    async def _collect(self, client: Client, body: api.GenerateRequest) -> Completion:
        completion = Completion()
        has_begun = False
        async for chunk in generate_resuming(client, body):
            completion.add(chunk)
            if not has_begun and (completion.num_tokens >= NUM_BEFORE or completion.finished is not None):
                has_begun = True
                self._num_to_begin -= 1
                if self._num_to_begin == 0:
                    write({"begun": True})
                await self._may_go_on.wait()
        return completion


def chunks_of(completion: Completion) -> Iterator[api.GenerateResponse]:
    """A completion as messages, whose encoding the versions have in common."""
    if completion.prompt_logprobs is not None:
        yield api.GenerateResponse(prompt_logprobs=completion.prompt_logprobs)
    for index, choice in sorted(completion.choices.items()):
        yield api.GenerateResponse(delta=api.ChoiceDelta(index=index, text=choice.text, tokens=choice.tokens))
        if choice.finished is not None:
            yield api.GenerateResponse(choice_finished=choice.finished)
    if completion.finished is not None:
        yield api.GenerateResponse(finished=completion.finished)


def write(line: dict[str, Any]) -> None:
    """Write a line of JSON."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Write the version, read requests up to an empty line, and run them."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    write({"version": __version__, "file": str(Path(api.__file__))})
    bodies = [api.GenerateRequest.FromString(base64.b64decode(line)) for line in iter(sys.stdin.readline, "\n")]
    async with Client(sys.argv[1], SmallBuffers()) as client:
        await Streams(len(bodies)).run(client, bodies)


if __name__ == "__main__":
    asyncio.run(main())
