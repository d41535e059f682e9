"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from specdec.gateway.api.answers import ChatCompletion, ChatCompletionChunk
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.chat.deltas import StreamingParser
from specdec.gateway.chat.template_parsers import ParserPair
from specdec.gateway.http.edge import NOT_ENFORCED, tell_names
from specdec.gateway.http.events import BegunStream, EventStream, begun, while_connected
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import JsonResponse, body_of, errors, streams
from specdec.gateway.routes.output import new_id, output, stream_error, whole_output
from specdec.gateway.translation.chat_answer import ChatEvents, ChatWhole
from specdec.gateway.translation.chat_request import (
    chat_field_names,
    chat_to_generate,
    echoed,
    parsers,
)
from specdec.gateway.translation.head import AnswerHead
from specdec.gateway.upstream.caller import CallerStub
from specdec.v1 import coordinator_pb2 as api


def chat_routes(parts: Parts) -> APIRouter:
    """The route of chats."""
    router = APIRouter(tags=["chat"])

    @router.post(
        "/v1/chat/completions",
        responses={**streams(ChatCompletion, ChatCompletionChunk), **errors(has_body=True)},
        openapi_extra=body_of(ChatRequest),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Continue a conversation."""
        unenforced: list[str] = []

        async def learn(asked: ChatRequest) -> ParserPair:
            return await parts.parsers_of(request, asked.model, streams=bool(asked.stream))

        def translated(
            asked: ChatRequest, names: ParserPair
        ) -> tuple[Callable[[], StreamingParser], api.GenerateRequest]:
            request.state.field_names = chat_field_names(asked, names.tools)
            make_parser = parsers(asked, names.reasoning, names.tools)
            return make_parser, chat_to_generate(asked, names.tools, names.reasoning, unenforced)

        asked, (make_parser, body) = await parts.reader.read_with(request, ChatRequest, learn, translated)
        tell_names(request, NOT_ENFORCED, unenforced)
        body.request_id = new_id(asked.request_id)
        head = AnswerHead(f"chatcmpl-{body.request_id}", int(time.time()))
        caller = parts.caller(request, asked.model)
        if asked.stream:
            events = ChatEvents(asked, head, make_parser, echoed(asked))
            batches = await while_connected(request.receive, _begun(parts, caller, asked, body, events))
            return EventStream(
                batches,
                on_error=stream_error(parts, request.state.field_names),
                keep_alive_s=parts.settings.keep_alive_s,
            )
        whole = ChatWhole(asked, head, make_parser, echoed(asked))
        return JsonResponse(await while_connected(request.receive, _answer(parts, caller, asked, body, whole)))

    return router


async def _begun(
    parts: Parts, caller: CallerStub, asked: ChatRequest, body: api.GenerateRequest, events: ChatEvents
) -> BegunStream:
    if asked.return_token_ids:
        events.tell_prompt(await _prompt_ids(caller, asked, body))
    return await begun(output(parts, caller, body, events.add))


async def _answer(
    parts: Parts, caller: CallerStub, asked: ChatRequest, body: api.GenerateRequest, whole: ChatWhole
) -> dict[str, object]:
    result = await whole_output(parts, caller, body)
    whole.begin(result.started)
    answer = whole.answer(result.choices, result.prompt_logprobs, result.texts, result.finished)
    if asked.return_token_ids:
        answer["prompt_token_ids"] = await _prompt_ids(caller, asked, body)
    return answer


async def _prompt_ids(caller: CallerStub, asked: ChatRequest, body: api.GenerateRequest) -> list[int]:
    answer = await caller.call("Tokenize", api.TokenizeRequest(model=body.model, messages=body.messages))
    return list(answer.token_ids)[-(asked.truncate_prompt_tokens or 0) :]
