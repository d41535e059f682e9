"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from specdec.gateway.api.errors import ApiError
from specdec.gateway.chat.deltas import StreamingParser
from specdec.gateway.chat.template_parsers import ParserPair
from specdec.gateway.http.events import Event, framed_by_name, while_connected
from specdec.gateway.parts import Parts
from specdec.gateway.responses.answer import ResponseEvents
from specdec.gateway.responses.request import ResponseAnswer, ResponseEvent, ResponsesRequest
from specdec.gateway.responses.to_chat import to_chat
from specdec.gateway.responses.tools import Tools
from specdec.gateway.routes.answers import JsonResponse, body_of, errors, streams
from specdec.gateway.routes.conversations import generate_request, named_events
from specdec.gateway.routes.output import kept, output
from specdec.gateway.routes.shortened import shortened_output
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.gateway.translation.head import AnswerHead
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest


def response_routes(parts: Parts) -> APIRouter:
    """The route of responses."""
    router = APIRouter(tags=["responses"])

    @router.post(
        "/v1/responses",
        responses={**streams(ResponseAnswer, ResponseEvent), **errors(has_body=True)},
        openapi_extra=body_of(ResponsesRequest),
    )
    async def create_response(request: Request) -> Response:
        """Answer a text or a conversation."""

        async def learn(asked: ResponsesRequest) -> ParserPair:
            return await parts.parsers_of(request, asked.model, streams=bool(asked.stream))

        def translated(
            asked: ResponsesRequest, names: ParserPair
        ) -> tuple[Tools, StreamingParser, api.GenerateRequest]:
            chat, tools = to_chat(asked, request.state.ignored)
            make_parser, body = generate_request(request, chat, names)
            return tools, make_parser(), body

        asked, (tools, parser, body) = await parts.reader.read_with(request, ResponsesRequest, learn, translated)
        head = AnswerHead(f"resp_{body.request_id}", int(time.time()))
        events = ResponseEvents(asked, tools, head, parser)
        caller = parts.caller(request, asked.model)
        # A stream's last event has the whole answer, too.
        tell = shortened_output if asked.truncation == "auto" else output
        batches = tell(parts, caller, body, kept(caller, events.add))
        if not asked.stream:
            return JsonResponse(await while_connected(request.receive, _last(batches)))

        def framed_error(error: ApiError) -> bytes:
            return b"".join(map(framed_by_name, events.fail(error)))

        return await named_events(parts, request, batches, framed_error)

    @router.post(
        "/v1/responses/input_tokens",
        responses={200: {"model": InputTokens}, **errors(has_body=True)},
        openapi_extra=body_of(ResponsesRequest),
    )
    async def count_input_tokens(request: Request) -> Response:
        """Length of the prompt of a response in tokens."""

        def translated(asked: ResponsesRequest) -> api.TokenizeRequest:
            chat, _ = to_chat(asked, request.state.ignored)
            request.state.field_names = chat.field_names("none")
            try:
                messages = chat_to_generate(chat.request).messages
            except InvalidRequest as error:
                raise chat.as_written(error) from None
            return api.TokenizeRequest(model=asked.model or "", messages=messages)

        asked, body = await parts.reader.read(request, ResponsesRequest, translated)
        answer = await while_connected(request.receive, parts.caller(request, asked.model).call("Tokenize", body))
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(answer.token_ids)})

    return router


class InputTokens(BaseModel):
    """The length of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


async def _last(batches: AsyncGenerator[Sequence[Event], None]) -> object:
    """The whole answer, from the last event."""
    whole: object = None
    async with aclosing(batches) as all_of:
        async for events in all_of:
            whole = events[-1].get("response", whole)
    return whole
