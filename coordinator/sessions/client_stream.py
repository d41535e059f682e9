"""The chunks on their way to one client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError
from specdec.wire.message_sizes import cut, text_pieces

_MOST_MERGED_TOKENS = 64
"""A chunk stays small: a write is charged and credited as a whole, and a client sees it as a whole."""
_MOST_MERGED_STEPS = 16
"""Each takes 1.2 KB with a tree of 64 nodes."""
_MOST_STEP_TOKENS = 65
"""What a step decides at most: 64 nodes, and one token more."""
_MOST_TEXT_BYTES = 32 * 1024
_MOST_PROMPT_BYTES = 256 * 1024
"""Clients take 4 MiB unless they say otherwise; what comes behind a chunk should not wait for so much."""
_TOKEN_ID_BYTES = 5


class ClientStream:
    """A queue with one reader. It is bounded by credit: targets run only so far ahead of what was taken and written.

    Deltas of one choice that wait behind a slow write are merged, so that a client that fell behind catches up in
    fewer chunks. No chunk is large: one of output has up to twice 64 tokens, and text to go with them.
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

    def output(
        self,
        index: int,
        text: str,
        detokenizers: DetokenizerFactory,
        token_ids: Sequence[int] = (),
        origins: Sequence[pb.Origin.ValueType] = (),
        logprobs: Sequence[pb.PositionLogprobs] = (),
        step: api.DecodingStep | None = None,
        drafters: Sequence[str] = (),
    ) -> None:
        """Queue output of a choice: some text, and tokens with their origins and, where wanted, log-probabilities and
        the step that they are of.

        `drafters`: who proposed each token, "" where no draft did; empty: not known.

        Of what is too much for one chunk no text comes before the tokens that it is of: a client that is cut off
        between two chunks can resume.
        """
        is_small = len(token_ids) <= _MOST_STEP_TOKENS and len(text) <= _MOST_TEXT_BYTES // 4
        if is_small:
            delta = self._delta(index)
            delta.text += text
            _add_tokens(delta, detokenizers, token_ids, origins, logprobs)
            if step is not None:
                delta.steps.append(step)
            if drafters:
                _name_drafters(delta.tokens[len(delta.tokens) - len(token_ids) :], drafters)
            return
        for start in range(0, len(token_ids), _MOST_MERGED_TOKENS):
            some = slice(start, start + _MOST_MERGED_TOKENS)
            delta = self._new_delta(index)
            _add_tokens(delta, detokenizers, token_ids[some], origins[some], logprobs[some])
            _name_drafters(delta.tokens, drafters[some])
        for piece in text_pieces(text, _MOST_TEXT_BYTES):
            self._new_delta(index).text = piece
        if step is not None:
            self._delta(index).steps.append(step)

    def close(self, error: SpecdecError | None = None) -> None:
        """End the stream after what is queued; with an error, what is queued still goes out before it."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._notify()

    async def wait_for_more(self) -> None:
        """Wait until a second chunk is there, or the end is.

        Raises:
            SpecdecError: the request failed before.
        """
        while len(self._chunks) < 2 and not self._is_closed:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if len(self._chunks) < 2 and self._error is not None:
            raise self._error

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

    def _delta(self, index: int) -> api.ChoiceDelta:
        """What output of a choice is to be added to, at once: the last chunk, if it can take it, or a new one.

        Built in place, for protobuf copies a message that becomes a part of another.
        """
        if self._chunks and not self._is_closed:
            last = self._chunks[-1]
            delta = last.delta
            has_room = (
                len(delta.tokens) < _MOST_MERGED_TOKENS
                and len(delta.text) < _MOST_TEXT_BYTES // 4
                and len(delta.steps) < _MOST_MERGED_STEPS
            )
            if last.HasField("delta") and delta.index == index and has_room:
                return delta
        return self._new_delta(index)

    def _new_delta(self, index: int) -> api.ChoiceDelta:
        chunk = api.GenerateResponse()
        chunk.delta.index = index
        self.push(chunk)
        return chunk.delta

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def prompt_chunks(
    token_ids: Sequence[int], start: int, positions: Sequence[pb.PositionLogprobs], *, is_joined: bool = False
) -> Iterator[api.GenerateResponse]:
    """Log-probabilities of a prompt's tokens from `start` on, as clients see them; token 0 goes with the first ones."""
    if is_joined:
        pieces: Iterable[slice] = [slice(0, len(positions))]
    else:
        pieces = cut((position.ByteSize() + _TOKEN_ID_BYTES for position in positions), _MOST_PROMPT_BYTES)
    for piece in pieces:
        first, stop = start + piece.start, start + piece.stop
        shown_from = 0 if first == 1 else first
        yield api.GenerateResponse(
            prompt_logprobs=api.PromptLogprobs(
                start_position=shown_from, token_ids=token_ids[shown_from:stop], positions=positions[piece]
            )
        )


def prompt_end(chunk: api.PromptLogprobs) -> int:
    """Position below which a client holds a prompt's log-probabilities with a chunk and those before it."""
    return chunk.start_position + len(chunk.token_ids)


def _add_tokens(
    delta: api.ChoiceDelta,
    detokenizers: DetokenizerFactory,
    token_ids: Sequence[int],
    origins: Sequence[pb.Origin.ValueType],
    logprobs: Sequence[pb.PositionLogprobs] = (),
) -> None:
    text, add = detokenizers.token_text, delta.tokens.add
    if logprobs:
        for token_id, origin, position in zip(token_ids, origins, logprobs, strict=False):
            add(id=token_id, text=text(token_id), origin=origin, logprobs=position)
    else:
        for token_id, origin in zip(token_ids, origins, strict=True):
            add(id=token_id, text=text(token_id), origin=origin)


def _name_drafters(tokens: Iterable[api.OutputToken], drafters: Sequence[str]) -> None:
    for token, name in zip(tokens, drafters, strict=False):
        token.drafter = name
