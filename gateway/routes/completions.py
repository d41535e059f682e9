"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from specdec.gateway.api.answers import TextCompletion
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.http.edge import NOT_ENFORCED, tell_names
from specdec.gateway.http.events import Event, EventStream, begun, while_connected
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import JsonResponse, body_of, errors, streams
from specdec.gateway.routes.merging import all_of, merged
from specdec.gateway.routes.output import WholeOutput, new_id, output, stream_error, whole_output
from specdec.gateway.translation.completion_answer import (
    KIND,
    CompletionEvents,
    CompletionWhole,
    PromptTold,
    completion_usage,
)
from specdec.gateway.translation.completion_request import (
    COMPLETION_FIELD_NAMES,
    PromptRequests,
    completion_to_generate,
)
from specdec.gateway.translation.constraint import constraint_names
from specdec.gateway.translation.head import AnswerHead
from specdec.gateway.upstream.caller import CallerStub
from specdec.v1 import coordinator_pb2 as api


def completion_routes(parts: Parts) -> APIRouter:
    """The route of completions."""
    router = APIRouter(tags=["completions"])

    @router.post(
        "/v1/completions",
        responses={**streams(TextCompletion, TextCompletion), **errors(has_body=True)},
        openapi_extra=body_of(CompletionRequest),
    )
    async def create_completion(request: Request) -> Response:
        """Continue texts or token ids."""
        unenforced: list[str] = []

        def translated(asked: CompletionRequest) -> PromptRequests:
            request.state.field_names = {**COMPLETION_FIELD_NAMES, **constraint_names(asked)}
            return completion_to_generate(asked, parts.settings.max_prompts, unenforced)

        asked, bodies = await parts.reader.read(request, CompletionRequest, translated)
        tell_names(request, NOT_ENFORCED, unenforced)
        bodies.request_id = id_ = new_id(asked.request_id)
        run = _Run(
            parts, parts.caller(request, asked.model), asked, bodies, AnswerHead(f"cmpl-{id_}", int(time.time()))
        )
        if asked.stream:
            batches = await while_connected(request.receive, begun(run.batches()))
            return EventStream(
                batches,
                on_error=stream_error(parts, request.state.field_names),
                keep_alive_s=parts.settings.keep_alive_s,
            )
        return JsonResponse(await while_connected(request.receive, run.answer()))

    return router


class _Run:
    """One request."""

    def __init__(
        self, parts: Parts, caller: CallerStub, asked: CompletionRequest, bodies: PromptRequests, head: AnswerHead
    ) -> None:
        self._parts = parts
        self._caller = caller
        self._asked = asked
        self._bodies = bodies
        self._head = head
        self._places = asyncio.Semaphore(parts.settings.max_concurrent_prompts)

    async def answer(self) -> dict[str, object]:
        """The whole answer, a `TextCompletion`."""
        results = await all_of([self._whole(number) for number in range(len(self._bodies))])
        self._head.take(results[0][0].started)
        choices = [
            choice
            for number, (result, told) in enumerate(results)
            for choice in CompletionWhole(self._asked, self._head, number, told).choices(
                result.choices, result.prompt_logprobs, result.texts
            )
        ]
        usage = completion_usage(self._asked, [result.finished for result, _ in results])
        return {**self._head.fields(KIND), "choices": choices, **usage}

    def batches(self) -> AsyncGenerator[Sequence[Event], None]:
        """The events of all prompts as they come, then the usage if the client wants it."""
        answers: list[CompletionEvents] = []
        streams_of = [self._events(number, answers) for number in range(len(self._bodies))]
        whole = streams_of[0] if len(streams_of) == 1 else merged(streams_of)
        return self._with_usage(whole, answers) if self._asked.has_usage_chunk else whole

    async def _with_usage(
        self, whole: AsyncGenerator[Sequence[Event], None], answers: list[CompletionEvents]
    ) -> AsyncGenerator[Sequence[Event], None]:
        async with aclosing(whole) as batches:
            async for batch in batches:
                yield batch
        finished = [answer.finished for answer in answers if answer.finished is not None]
        yield [{**self._head.fields(KIND), "choices": [], **completion_usage(self._asked, finished)}]

    async def _whole(self, number: int) -> tuple[WholeOutput, PromptTold]:
        async with self._places:
            body = self._bodies[number]
            told = await self._told(body)
            return await whole_output(self._parts, self._caller, body), told

    async def _events(self, number: int, answers: list[CompletionEvents]) -> AsyncGenerator[Sequence[Event], None]:
        async with self._places:
            body = self._bodies[number]
            answer = CompletionEvents(self._asked, self._head, number, await self._told(body))
            answers.append(answer)
            async with aclosing(output(self._parts, self._caller, body, answer.add)) as batches:
                async for batch in batches:
                    yield batch

    async def _told(self, body: api.GenerateRequest) -> PromptTold:
        """The prompt's text and ids for the answer; a coordinator converts the form that the client did not send."""
        asked = self._asked
        text, ids = "", None
        is_text = body.WhichOneof("input") == "prompt"
        if asked.echo and is_text:
            text = body.prompt
        elif asked.echo:
            skips = asked.skip_special_tokens is not False
            ids_told = body.prompt_token_ids.token_ids
            wanted = api.DetokenizeRequest(token_ids=ids_told, skip_special_tokens=skips, is_prompt=True)
            text = (await self._caller.call("Detokenize", wanted)).text
        if asked.return_token_ids and is_text:
            ids = list((await self._caller.call("Tokenize", api.TokenizeRequest(text=body.prompt))).token_ids)
        elif asked.return_token_ids:
            ids = list(body.prompt_token_ids.token_ids)
        if ids is not None:
            ids = ids[-(asked.truncate_prompt_tokens or 0) :]
        return PromptTold(text, ids)
