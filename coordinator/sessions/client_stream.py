"""The chunks on their way to one client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError
from specdec.wire.message_sizes import frame_slices, text_pieces

_MOST_MERGED_TOKENS = 64
"""Tokens above which no delta is merged into a chunk: a write is charged and credited as a whole."""
_MOST_MERGED_ALTERNATIVES = 256
"""Log-probabilities above which no delta is merged into a chunk. A gateway holds a chunk while its client does not
read, and takes a hundred bytes for each of them."""
_MOST_MERGED_STEPS = 16
"""Steps above which no delta is merged into a chunk: a step with a tree of 64 nodes has 1.2 KB."""
_MOST_STEP_TOKENS = 65
"""Tokens that one step commits, at most: 64 nodes and the target's own."""
_MOST_TEXT_BYTES = 32 * 1024
"""Bytes of text in a chunk, at most."""
_MOST_PROMPT_BYTES = 256 * 1024
"""Bytes of prompt log-probabilities in a chunk, far below gRPC's limit of 4 MiB: later chunks must not wait long."""
_TOKEN_ID_BYTES = 5
"""Bytes of an encoded token id."""


class ClientStream:
    """A queue of chunks with one reader. Credit bounds it: targets run at most one window ahead of written chunks.
    Output of any length is cut into chunks when these are taken.

    Deltas of one choice that wait behind a slow write are merged, so that a slow client catches up in fewer chunks. An
    output chunk has at most twice 64 tokens, and their text.
    """

    def __init__(self) -> None:
        self._chunks: deque[api.GenerateResponse | Iterator[api.GenerateResponse]] = deque()
        """Chunks, and long output of which chunks are to be made."""
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
        """Queue output of a choice: text, and tokens with their origins, log-probabilities and step if wanted.

        Args:
            index: the choice.
            text: text that is ready.
            detokenizers: gives each token's own text.
            token_ids: new tokens.
            origins: one per token.
            logprobs: one per token, or empty.
            step: the step that committed the tokens, if the client wants steps.
            drafters: name of each token's drafter, "" for other origins; empty: unknown.

        In output too large for one chunk, text never precedes its tokens: a client that is cut off between two chunks
        can resume.
        """
        is_small = len(token_ids) <= _MOST_STEP_TOKENS and len(text) <= _MOST_TEXT_BYTES // 4
        if is_small:
            delta = self._delta(index, _most_merged(logprobs))
            delta.text += text
            _add_tokens(delta, detokenizers, token_ids, origins, logprobs)
            if step is not None:
                delta.steps.append(step)
            if drafters:
                _name_drafters(delta.tokens[len(delta.tokens) - len(token_ids) :], drafters)
            return
        if not self._is_closed:
            tokens = _token_chunks(index, detokenizers, token_ids, origins, logprobs, drafters)
            texts = (_chunk(index, text=piece) for piece in text_pieces(text, _MOST_TEXT_BYTES))
            steps = (_chunk(index, steps=[each]) for each in (step,) if each is not None)
            self._chunks.append(chain(tokens, texts, steps))
            self._notify()

    def close(self, error: SpecdecError | None = None) -> None:
        """End the stream after the queued chunks, with `error` if any."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._notify()

    async def wait_for_more(self) -> None:
        """Wait for a second chunk or the end.

        Raises:
            SpecdecError: the request failed before a second chunk.
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
        while True:
            while self._chunks:
                first = self._chunks[0]
                if isinstance(first, api.GenerateResponse):
                    self._chunks.popleft()
                    return first
                if (chunk := next(first, None)) is not None:
                    return chunk
                self._chunks.popleft()
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _delta(self, index: int, most_tokens: int) -> api.ChoiceDelta:
        """The delta to which a choice's output is added: the last chunk's if it has fewer tokens than this and room for
        text and steps, otherwise a new one.

        It is changed in place, because protobuf copies a message that becomes part of another.
        """
        last = self._chunks[-1] if self._chunks and not self._is_closed else None
        if isinstance(last, api.GenerateResponse):
            delta = last.delta
            has_room = (
                len(delta.tokens) < most_tokens
                and len(delta.text) < _MOST_TEXT_BYTES // 4
                and len(delta.steps) < _MOST_MERGED_STEPS
            )
            if last.HasField("delta") and delta.index == index and has_room:
                return delta
        return self._new_delta(index)

    def _new_delta(self, index: int) -> api.ChoiceDelta:
        chunk = _chunk(index)
        self.push(chunk)
        return chunk.delta

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def prompt_chunks(
    token_ids: Sequence[int], start: int, positions: Sequence[pb.PositionLogprobs], *, is_joined: bool = False
) -> Iterator[api.GenerateResponse]:
    """Chunks with a prompt's log-probabilities from position `start` on; token 0 goes with the first."""
    if is_joined:
        pieces: Iterable[slice] = [slice(0, len(positions))]
    else:
        pieces = frame_slices((position.ByteSize() + _TOKEN_ID_BYTES for position in positions), _MOST_PROMPT_BYTES)
    for piece in pieces:
        first, stop = start + piece.start, start + piece.stop
        shown_from = 0 if first == 1 else first
        yield api.GenerateResponse(
            prompt_logprobs=api.PromptLogprobs(
                start_position=shown_from, token_ids=token_ids[shown_from:stop], positions=positions[piece]
            )
        )


def prompt_end(chunk: api.PromptLogprobs) -> int:
    """Position below which a client has a prompt's log-probabilities after this chunk."""
    return chunk.start_position + len(chunk.token_ids)


def _chunk(index: int, text: str = "", steps: Iterable[api.DecodingStep] = ()) -> api.GenerateResponse:
    return api.GenerateResponse(delta=api.ChoiceDelta(index=index, text=text, steps=steps))


def _most_merged(logprobs: Sequence[pb.PositionLogprobs]) -> int:
    """Tokens with such log-probabilities above which a chunk takes no more."""
    if not logprobs:
        return _MOST_MERGED_TOKENS
    return min(_MOST_MERGED_TOKENS, _MOST_MERGED_ALTERNATIVES // (1 + len(logprobs[0].top)) + 1)


def _token_chunks(
    index: int,
    detokenizers: DetokenizerFactory,
    token_ids: Sequence[int],
    origins: Sequence[pb.Origin.ValueType],
    logprobs: Sequence[pb.PositionLogprobs],
    drafters: Sequence[str],
) -> Iterator[api.GenerateResponse]:
    """A choice's tokens, cut into chunks as they are asked for."""
    most_tokens = _most_merged(logprobs)
    for start in range(0, len(token_ids), most_tokens):
        some = slice(start, start + most_tokens)
        chunk = _chunk(index)
        _add_tokens(chunk.delta, detokenizers, token_ids[some], origins[some], logprobs[some])
        _name_drafters(chunk.delta.tokens, drafters[some])
        yield chunk


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
