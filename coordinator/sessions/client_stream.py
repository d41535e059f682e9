"""The chunks on their way to one client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from coordinator.text.detokenizer import DetokenizerFactory
from specdec.rpc.errors import SpecdecError
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_MOST_MERGED_TOKENS = 64
"""A chunk stays small: a write is charged and credited as a whole, and a client sees it as a whole."""


class ClientStream:
    """A queue with one reader. It is bounded by credit: targets run only so far ahead of what was taken and written.

    Deltas of one choice that wait behind a slow write are merged, so that a client that fell behind catches up in
    fewer chunks.
    """

    def __init__(self) -> None:
        self._chunks: deque[api.GenerateResponse] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: SpecdecError | None = None

    @property
    def is_closed(self) -> bool:
        """Nothing more will be queued."""
        return self._is_closed

    def push(self, chunk: api.GenerateResponse) -> None:
        """Queue a chunk."""
        if not self._is_closed:
            self._chunks.append(chunk)
            self._notify()

    def delta(self, index: int) -> api.ChoiceDelta:
        """What output of a choice is to be added to, at once: the last chunk, if it can take it, or a new one.

        Built in place, for protobuf copies a message that becomes a part of another.
        """
        if self._chunks and not self._is_closed:
            last = self._chunks[-1]
            delta = last.delta
            if last.HasField("delta") and delta.index == index and len(delta.tokens) < _MOST_MERGED_TOKENS:
                return delta
        chunk = api.GenerateResponse()
        chunk.delta.index = index
        self.push(chunk)
        return chunk.delta

    def close(self, error: SpecdecError | None = None) -> None:
        """End the stream after what is queued; with an error, what is queued still goes out before it."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._notify()

    async def take(self) -> api.GenerateResponse | None:
        """The next chunk, or None at the end.

        Raises:
            SpecdecError: the request failed.
        """
        while not self._chunks:
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self._chunks.popleft()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def add_tokens(
    delta: api.ChoiceDelta,
    detokenizers: DetokenizerFactory,
    token_ids: Sequence[int],
    origins: Sequence[pb.Origin.ValueType],
    logprobs: Sequence[pb.PositionLogprobs] = (),
) -> None:
    """Add tokens as clients see them."""
    text, add = detokenizers.token_text, delta.tokens.add
    if logprobs:
        for token_id, origin, position in zip(token_ids, origins, logprobs, strict=False):
            add(id=token_id, text=text(token_id), origin=origin, logprobs=position)
    else:
        for token_id, origin in zip(token_ids, origins, strict=True):
            add(id=token_id, text=text(token_id), origin=origin)
