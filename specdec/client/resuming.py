"""Streams that survive a coordinator's end: they resume at the same or another coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from specdec.client.completion import Completion
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.backoff import Backoff
from specdec.wire.errors import Unavailable

SPREAD = (0.5, 1.0)
"""Random factors of a wait."""
FIRST_SPREAD = (0.0, 2.0)
"""Random factors of the first wait: a lost coordinator's streams, which end together, are resumed evenly."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Bounds of the attempts. Times in seconds."""

    max_attempts: int = 8
    """Attempts in a row without a new token or prompt log-probability."""
    max_wait_s: float = 5.0
    """Longest wait between two attempts. The first wait is the server's retry delay times a random factor of 0 to 2;
    each further one doubles the delay, times 0.5 to 1. With the defaults a coordinator may be away for at least 12 s.
    """

    def wait_s(
        self, delay_s: float, num_fruitless: int, uniform: Callable[[float, float], float] | None = None
    ) -> float:
        """Seconds until the next attempt after `num_fruitless` (at least 1) in a row, with the server's delay."""
        spread = FIRST_SPREAD if num_fruitless == 1 else SPREAD
        return min(self.max_wait_s, Backoff(delay_s, self.max_wait_s, spread, uniform).wait_s(num_fruitless))


class Generates(Protocol):
    """A source of streams: one client, or several."""

    def generate(self, request: api.GenerateRequest) -> AsyncGenerator[api.GenerateResponse, None]:
        """See `Client.generate`."""


async def generate_resuming(
    client: Generates, request: api.GenerateRequest, policy: ResumePolicy | None = None
) -> AsyncGenerator[api.GenerateResponse, None]:
    """Yield the chunks of a request as if its stream had never been interrupted.

    After UNAVAILABLE (a coordinator drains or died) the request is sent again with the tokens received so far, and
    continues after them: no token comes twice and none is lost. The last chunk's statistics cover only the last part.
    If the client's name has several addresses, any coordinator with the same `resume_secret` can resume it. If the
    request itself resumes one, only the output after its tokens comes.

    Raises:
        SpecdecError: the request failed for another reason, or `max_attempts` attempts in a row brought nothing.
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


@dataclass(slots=True)
class _HeldChoice:
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_text_bytes: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class _Held:
    """Received output, as far as a resumed request tells it: alternatives of a token may have kilobytes."""

    started: api.GenerateStarted | None = None
    prompt_logprobs_position: int = 0
    """Position below which the prompt's log-probabilities have come."""
    choices: dict[int, _HeldChoice] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, chunk: api.GenerateResponse) -> None:
        """Note the next chunk."""
        match chunk.WhichOneof("chunk"):
            case "started":
                self.started = chunk.started
            case "prompt_logprobs":
                told = chunk.prompt_logprobs
                self.prompt_logprobs_position = told.start_position + len(told.token_ids)
            case "delta":
                self.add_output(chunk.delta.index, [token.id for token in chunk.delta.tokens], chunk.delta.text)
            case "choice_finished":
                self.choices.setdefault(chunk.choice_finished.index, _HeldChoice()).is_finished = True

    def add_output(self, index: int, token_ids: list[int], text: str) -> None:
        """Note output of a choice."""
        choice = self.choices.setdefault(index, _HeldChoice())
        choice.token_ids.extend(token_ids)
        choice.num_text_bytes += len(text.encode())
        self.num_tokens += len(token_ids)


class Resumption:
    """The received part of a request's answer, and the next attempt's request and wait. Makes no calls."""

    def __init__(self, request: api.GenerateRequest, policy: ResumePolicy | None = None) -> None:
        self._request = request
        self._policy = policy or ResumePolicy()
        self._held = _Held()
        self._num_held_before = 0
        self._num_fruitless = 0

    def body(self) -> api.GenerateRequest:
        """The request of the next attempt."""
        self._num_held_before = _num_held(self._held)
        return self._request if self._held.started is None else _resumed(self._request, self._held.started, self._held)

    def unseen(self, chunk: api.GenerateResponse) -> api.GenerateResponse | None:
        """The new part of a chunk, which counts as received now; None if it has none."""
        new = _unseen(chunk, self._held)
        if new is not None:
            self._held.add(new)
        return new

    def wait_after(self, error: Unavailable) -> float:
        """Seconds until the next attempt after `error`. Raises it if there should be none."""
        has_more = _num_held(self._held) > self._num_held_before
        self._num_fruitless = 1 if has_more else self._num_fruitless + 1
        is_resumable = self._held.started is not None or self._request.HasField("resume")
        if not is_resumable or self._num_fruitless >= self._policy.max_attempts:
            raise error
        wait_s = self._policy.wait_s(error.retry_after_s, self._num_fruitless)
        if structlog.is_configured():  # otherwise it would write among the text that a program prints
            num_tokens = self._held.num_tokens
            _log.debug("stream_interrupted", reason=error.reason, num_tokens=num_tokens, wait_s=round(wait_s, 3))
        return wait_s


def resumed_request(request: api.GenerateRequest, held: Completion) -> api.GenerateRequest:
    """The request that continues after the received output. `held.started` must be set.

    If the request itself resumes one, `held` is the output after its tokens.
    """
    if held.started is None:
        raise ValueError("started: a request cannot be resumed before its first chunk")
    told = _Held(held.started, held.prompt_logprobs_position)
    for index, choice in held.choices.items():
        told.add_output(index, choice.token_ids, choice.text)
    return _resumed(request, held.started, told)


def _resumed(request: api.GenerateRequest, started: api.GenerateStarted, held: _Held) -> api.GenerateRequest:
    body = api.GenerateRequest()
    body.CopyFrom(request)
    body.request_id = started.request_id
    body.sampling.seed = started.seed
    body.resume.resume_token = started.resume_token
    if started.HasField("model"):
        body.resume.model.CopyFrom(started.model)
    if request.HasField("messages") and not request.messages.chat_template:
        body.resume.chat_template_digest = started.chat_template_digest
    before = {choice.index: choice for choice in body.resume.choices}
    if request.sampling.HasField("prompt_logprobs") and (held.prompt_logprobs_position or not before):
        body.resume.prompt_logprobs_position = max(
            held.prompt_logprobs_position, request.resume.prompt_logprobs_position
        )
    for index, choice in held.choices.items():
        told = before[index] if index in before else body.resume.choices.add(index=index)
        told.token_ids.extend(choice.token_ids)
        told.text_offset_bytes += choice.num_text_bytes
    return body


def _num_held(held: _Held) -> int:
    return held.num_tokens + held.prompt_logprobs_position


def _unseen(chunk: api.GenerateResponse, held: _Held) -> api.GenerateResponse | None:
    """The new part of a chunk, as a chunk; None if it has none."""
    match chunk.WhichOneof("chunk"):
        case "started":
            is_new = held.started is None
        case "prompt_logprobs":
            return _unseen_prompt(chunk, held.prompt_logprobs_position)
        case "choice_finished":
            choice = held.choices.get(chunk.choice_finished.index)
            is_new = choice is None or not choice.is_finished
        case _:
            is_new = True
    return chunk if is_new else None


def _unseen_prompt(chunk: api.GenerateResponse, held: int) -> api.GenerateResponse | None:
    """Older coordinators send all log-probabilities of the prompt again."""
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
