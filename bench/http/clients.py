"""Streams over gRPC and HTTP, read at little cost, and the transit time of each token."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.client import Client
from specdec.v1 import coordinator_pb2 as api

_SENT = re.compile(rb"(\d{6,})\|")


@dataclass(slots=True)
class Timed:
    """Times of one stream, in ns of the machine's monotonic clock."""

    asked_ns: int = 0
    first_ns: int = 0
    delays_ns: list[int] = field(default_factory=list)
    """Transit times from the coordinator to here, of each token but the first."""

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return len(self.delays_ns) + bool(self.first_ns)

    def saw(self, sent_ns: Sequence[int]) -> None:
        """Record tokens that have just arrived, by the times at which they were sent."""
        now_ns = time.monotonic_ns()
        for sent in sent_ns:
            if self.first_ns:
                self.delays_ns.append(now_ns - sent)
            else:
                self.first_ns = now_ns


async def over_grpc(client: Client, num_tokens: int) -> Timed:
    """Read one stream from a coordinator."""
    body = api.GenerateRequest(prompt="x")
    body.sampling.max_tokens = num_tokens
    timed = Timed(asked_ns=time.monotonic_ns())
    async for chunk in client.generate(body):
        if chunk.WhichOneof("chunk") == "delta":
            timed.saw([int(chunk.delta.text[:-1])])
    return timed


class _Reading(asyncio.Protocol):
    """Records the tokens of one connection until the stream's end."""

    def __init__(self, timed: Timed) -> None:
        self._timed = timed
        self._rest = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        events, _, self._rest = data.rpartition(b"\n\n")
        if sent := _SENT.findall(events):
            self._timed.saw([int(one) for one in sent])
        if b"data: [DONE]" in data and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(self._rest[-500:].decode(errors="replace")))


async def over_http(port: int, num_tokens: int, wait_s: float = 0.0) -> Timed:
    """Read one stream from a gateway; the connection is opened before the clock starts."""
    timed = Timed()
    transport, reading = await asyncio.get_running_loop().create_connection(lambda: _Reading(timed), "127.0.0.1", port)
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    await asyncio.sleep(wait_s)
    timed.asked_ns = time.monotonic_ns()
    transport.write(f"{head}\r\n\r\n".encode() + body)
    await reading.ended
    transport.close()
    return timed
