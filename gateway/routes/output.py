"""Output on its way from the coordinators to an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from specdec.client import Completion
from specdec.gateway.api.errors import SERVER_ERROR, ApiError, from_specdec
from specdec.gateway.parts import Parts
from specdec.gateway.translation.chat_answer import ParsedOutput
from specdec.gateway.translation.logprobs import ids_in
from specdec.gateway.upstream.caller import CallerStub
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError, internal_error

T = TypeVar("T")
_COST_OF_OUTPUT = 3
"""Bytes of a body that cost as much memory as a byte of output: it is kept as messages, as objects and as JSON."""
Translate = Callable[[api.GenerateResponse, TokenTexts], T]
"""Converts a chunk, with the texts of the tokens in its log-probabilities."""


async def output(
    parts: Parts, caller: CallerStub, body: api.GenerateRequest, translate: Translate[T]
) -> AsyncGenerator[T, None]:
    """The non-empty translations of a request's chunks. The caller must close it, which cancels the request.

    Raises SpecdecError.
    """
    began_s, digest, texts = time.perf_counter(), "", TokenTexts({})
    names_tokens = body.sampling.HasField("logprobs") or body.sampling.HasField("prompt_logprobs")
    has_output = False
    with parts.picker.request() as now_runs:
        async with aclosing(caller.stream(body)) as chunks:
            async for chunk in chunks:
                kind = chunk.WhichOneof("chunk")
                if kind == "started":
                    digest = chunk.started.model.tokenizer_digest
                elif kind == "finished":
                    parts.on_finished(chunk.finished)
                elif not has_output:
                    has_output = True
                    now_runs()
                    parts.metrics.first_token_seconds.observe(time.perf_counter() - began_s)
                if names_tokens:
                    texts = await parts.vocabulary.learn(caller, digest, ids_in(chunk))
                if told := translate(chunk, texts):
                    yield told


def kept(caller: CallerStub, translate: Translate[T]) -> Translate[T]:
    """`translate` for an answer that is kept whole: it raises Overloaded if there is no room for the next chunk."""

    def told(chunk: api.GenerateResponse, texts: TokenTexts) -> T:
        caller.held.grow(_COST_OF_OUTPUT * chunk.ByteSize())
        return translate(chunk, texts)

    return told


@dataclass(slots=True)
class WholeOutput:
    """The whole output of one prompt."""

    started: api.GenerateStarted
    finished: api.GenerateFinished
    choices: dict[int, ParsedOutput]
    prompt_logprobs: api.PromptLogprobs | None
    texts: TokenTexts


def _both(chunk: api.GenerateResponse, texts: TokenTexts) -> tuple[api.GenerateResponse, TokenTexts]:
    return chunk, texts


async def whole_output(parts: Parts, caller: CallerStub, body: api.GenerateRequest) -> WholeOutput:
    """Collect the whole output. Raises SpecdecError: Overloaded if there is no room for it."""
    completion, texts = Completion(), TokenTexts({})
    async with aclosing(output(parts, caller, body, kept(caller, _both))) as all_told:
        async for chunk, known in all_told:
            completion.add(chunk)
            texts = known
    finished = completion.require_finished()
    choices = {
        index: ParsedOutput(
            choice.text, choice.tokens, choice.finished or api.ChoiceFinished(index=index), choice.steps
        )
        for index, choice in completion.choices.items()
    }
    started = completion.started or api.GenerateStarted()
    return WholeOutput(started, finished, choices, completion.prompt_logprobs, texts)


def new_id(wanted: str | None) -> str:
    """The client's id, or a random one."""
    return wanted or uuid.uuid4().hex


def stream_error(parts: Parts, names: Mapping[str, str]) -> Callable[[BaseException], ApiError]:
    """A function that counts an error that ends a stream, and converts it for the client."""

    def told(error: BaseException) -> ApiError:
        parts.metrics.stream_errors.inc()
        return as_api_error(error, names)

    return told


def as_api_error(error: BaseException, names: Mapping[str, str]) -> ApiError:
    """The answer for an exception; an unexpected one is logged, and the answer has only its id in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SpecdecError):
        return from_specdec(error, names)
    return ApiError(500, internal_error(error).message, type=SERVER_ERROR, code="internal_error")
