"""Streams that outlive a coordinator: what was interrupted is taken up again, at the same or another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

import structlog

from specdec.client.client import Completion
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.backoff import Backoff
from specdec.wire.errors import Unavailable

_SPREAD = (0.5, 1.0)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How long to try. Times in seconds."""

    max_attempts: int = 8
    """Attempts in a row that bring neither a token nor more of the prompt's log-probabilities."""
    max_wait_s: float = 5.0
    """Longest wait between two of them, whatever the server asks for. The first is what it asks for, and each is twice
    the one before, down to half of that by chance: with the defaults a coordinator may be away for 12 s at least."""


class Generates(Protocol):
    """What streams are taken from: a client, or several."""

    def generate(self, request: api.GenerateRequest) -> AsyncGenerator[api.GenerateResponse, None]:
        """See `Client.generate`."""


async def generate_resuming(
    client: Generates, request: api.GenerateRequest, policy: ResumePolicy | None = None
) -> AsyncGenerator[api.GenerateResponse, None]:
    """Yield the chunks of a request as if its stream had never been interrupted.

    After UNAVAILABLE (a coordinator drains or died) the request is sent again with the tokens held so far, and goes on
    behind the last of them: no token comes twice and none is lost. The statistics of the last chunk are those of the
    last part. With several addresses behind the client's name, any coordinator with the same `resume_secret` takes it
    up. The request may itself resume one: then what comes is what follows what it holds.

    Raises:
        SpecdecError: the request failed for another reason, or attempts brought nothing `max_attempts` times in a row.
    """
    resumption = Resumption(request, policy)
    while True:
        try:
            async with contextlib.aclosing(client.generate(resumption.body())) as chunks:
                async for chunk in chunks:
                    if (new := resumption.unseen(chunk)) is not None:
                        yield new
            return
        except Unavailable as error:
            wait_s = resumption.wait_after(error)
        await asyncio.sleep(wait_s)


class Resumption:
    """What is held of a request's answer, and when it is asked for again; without calls or waits of its own."""

    def __init__(self, request: api.GenerateRequest, policy: ResumePolicy | None = None) -> None:
        self._request = request
        self._policy = policy or ResumePolicy()
        self._held = Completion()
        self._unread: list[api.GenerateResponse] = []
        """Output that is held, too, and is looked at when the stream breaks, which few do."""
        self._num_held_before = 0
        self._num_fruitless = 0

    def body(self) -> api.GenerateRequest:
        """The request of the next attempt."""
        self._read_all()
        self._num_held_before = _num_held(self._held)
        return self._request if self._held.started is None else resumed_request(self._request, self._held)

    def unseen(self, chunk: api.GenerateResponse) -> api.GenerateResponse | None:
        """What a chunk has that is not held yet, which from now on is; None: nothing."""
        if chunk.HasField("delta"):
            self._unread.append(chunk)
            return chunk
        self._read_all()
        new = _unseen(chunk, self._held)
        if new is not None:
            self._held.add(new)
        return new

    def wait_after(self, error: Unavailable) -> float:
        """Seconds until the next attempt, after one ended so. Raises that error when there is to be none."""
        self._read_all()
        has_more = _num_held(self._held) > self._num_held_before
        self._num_fruitless = 1 if has_more else self._num_fruitless + 1
        is_resumable = self._held.started is not None or self._request.HasField("resume")
        if not is_resumable or self._num_fruitless >= self._policy.max_attempts:
            raise error
        wait_s = Backoff(error.retry_after_s, self._policy.max_wait_s, _SPREAD).wait_s(self._num_fruitless)
        num_tokens = self._held.num_tokens
        _log.info("stream_interrupted", reason=error.reason, num_tokens=num_tokens, wait_s=round(wait_s, 3))
        return wait_s

    def _read_all(self) -> None:
        for chunk in self._unread:
            self._held.add(chunk)
        self._unread.clear()


def resumed_request(request: api.GenerateRequest, held: Completion) -> api.GenerateRequest:
    """The request that goes on behind what is held of it. `held.started` must be there.

    If the request resumes one itself, `held` is what followed what it holds.
    """
    if held.started is None:
        raise ValueError("without its first chunk a request cannot be resumed")
    body = api.GenerateRequest()
    body.CopyFrom(request)
    body.request_id = held.started.request_id
    body.sampling.seed = held.started.seed
    body.resume.resume_token = held.started.resume_token
    before = {choice.index: choice for choice in body.resume.choices}
    if request.sampling.HasField("prompt_logprobs") and (held.prompt_logprobs_position or not before):
        body.resume.prompt_logprobs_position = max(
            held.prompt_logprobs_position, request.resume.prompt_logprobs_position
        )
    for index, choice in held.choices.items():
        told = before[index] if index in before else body.resume.choices.add(index=index)
        told.token_ids.extend(choice.token_ids)
        told.text_offset_bytes += len(choice.text.encode())
    return body


def _num_held(held: Completion) -> int:
    return held.num_tokens + held.prompt_logprobs_position


def _unseen(chunk: api.GenerateResponse, held: Completion) -> api.GenerateResponse | None:
    """What a chunk has that is not held yet, as a chunk; None: nothing."""
    match chunk.WhichOneof("chunk"):
        case "started":
            is_new = held.started is None
        case "prompt_logprobs":
            return _unseen_prompt(chunk, held.prompt_logprobs_position)
        case "choice_finished":
            choice = held.choices.get(chunk.choice_finished.index)
            is_new = choice is None or choice.finished is None
        case _:
            is_new = True
    return chunk if is_new else None


def _unseen_prompt(chunk: api.GenerateResponse, held: int) -> api.GenerateResponse | None:
    """Coordinators that do not know how much is held send all of the prompt's log-probabilities again."""
    told = chunk.prompt_logprobs
    num_seen = held - told.start_position
    if num_seen <= 0:
        return chunk
    if num_seen >= len(told.token_ids):
        return None
    # The prompt's first token has no position.
    num_positions_seen = num_seen - (told.start_position == 0)
    rest = api.PromptLogprobs(
        start_position=held, token_ids=told.token_ids[num_seen:], positions=told.positions[num_positions_seen:]
    )
    return api.GenerateResponse(prompt_logprobs=rest)
