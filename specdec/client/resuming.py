"""Streams that outlive a coordinator: what was interrupted is taken up again, at the same or another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from specdec.backoff import Backoff
from specdec.client.client import Client, Completion
from specdec.rpc.errors import Unavailable
from specdec.v1 import coordinator_pb2 as api

_SPREAD = (0.5, 1.0)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How long to try. Times in seconds."""

    max_attempts: int = 8
    """Attempts in a row that bring no token."""
    max_wait_s: float = 5.0
    """Longest wait between two of them, whatever the server asks for. The first is what it asks for, and each is twice
    the one before, down to half of that by chance: with the defaults a coordinator may be away for 12 s at least."""


async def generate_resuming(
    client: Client, request: api.GenerateRequest, policy: ResumePolicy | None = None
) -> AsyncIterator[api.GenerateResponse]:
    """Yield the chunks of a request as if its stream had never been interrupted.

    After UNAVAILABLE (a coordinator drains or died) the request is sent again with the tokens held so far, and goes on
    behind the last of them: no token comes twice and none is lost. The statistics of the last chunk are those of the
    last part. With several addresses behind the client's name, any coordinator with the same `resume_secret` takes it
    up.

    Raises:
        SpecdecError: the request failed for another reason, or attempts brought nothing `max_attempts` times in a row.
    """
    policy = policy or ResumePolicy()
    held = Completion()
    body, num_fruitless = request, 0
    while True:
        num_held = held.num_tokens
        try:
            async for chunk in client.generate(body):
                if _is_new(chunk, held):
                    held.add(chunk)
                    yield chunk
            return
        except Unavailable as error:
            num_fruitless = 1 if held.num_tokens > num_held else num_fruitless + 1
            if held.started is None or num_fruitless >= policy.max_attempts:
                raise
            wait_s = Backoff(error.retry_after_s, policy.max_wait_s, _SPREAD).wait_s(num_fruitless)
            _log.info("stream_interrupted", reason=error.reason, num_tokens=held.num_tokens, wait_s=round(wait_s, 3))
        await asyncio.sleep(wait_s)
        body = resumed_request(request, held)


def resumed_request(request: api.GenerateRequest, held: Completion) -> api.GenerateRequest:
    """The request that goes on behind what is held of it. `held.started` must be there."""
    if held.started is None:
        raise ValueError("without its first chunk a request cannot be resumed")
    body = api.GenerateRequest()
    body.CopyFrom(request)
    body.request_id = held.started.request_id
    body.sampling.seed = held.started.seed
    body.resume.resume_token = held.started.resume_token
    for index, choice in held.choices.items():
        body.resume.choices.add(index=index, token_ids=choice.token_ids, text_offset_bytes=len(choice.text.encode()))
    return body


def _is_new(chunk: api.GenerateResponse, held: Completion) -> bool:
    match chunk.WhichOneof("chunk"):
        case "started":
            return held.started is None
        case "prompt_logprobs":
            return held.prompt_logprobs is None
        case "choice_finished":
            choice = held.choices.get(chunk.choice_finished.index)
            return choice is None or choice.finished is None
        case _:
            return True
