"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from specdec.gateway.anthropic.answer import MessageEvents, whole_message
from specdec.gateway.anthropic.request import CountTokensRequest, MessagesRequest
from specdec.gateway.anthropic.to_chat import to_chat
from specdec.gateway.api.errors import ApiError
from specdec.gateway.chat.deltas import StreamingParser
from specdec.gateway.chat.template_parsers import ParserPair
from specdec.gateway.http.events import Event, framed_by_name, while_connected
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import JsonResponse, anthropic_error, body_of, errors, streams
from specdec.gateway.routes.conversations import generate_request, named_events
from specdec.gateway.routes.output import Translate, kept, output
from specdec.gateway.translation.chat_request import CHAT_FIELD_NAMES, chat_to_generate
from specdec.gateway.translation.head import AnswerHead
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest


class AnthropicMessage(BaseModel):
    """A message as at Anthropic."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    usage: dict[str, int]


class MessageEvent(BaseModel):
    """An event of a streamed message; more fields depend on the type, as at Anthropic."""

    model_config = ConfigDict(extra="allow")

    type: str


class CountedTokens(BaseModel):
    """The length of a conversation."""

    input_tokens: int


def message_routes(parts: Parts) -> APIRouter:
    """The routes of messages."""
    router = APIRouter(tags=["messages"])

    @router.post(
        "/v1/messages",
        responses={**streams(AnthropicMessage, MessageEvent), **errors(has_body=True)},
        openapi_extra=body_of(MessagesRequest),
    )
    async def create_message(request: Request) -> Response:
        """Continue a conversation."""

        async def learn(asked: MessagesRequest) -> ParserPair:
            return await parts.parsers_of(request, asked.model, streams=bool(asked.stream))

        def translated(
            asked: MessagesRequest, names: ParserPair
        ) -> tuple[Callable[[], StreamingParser], api.GenerateRequest]:
            return generate_request(request, to_chat(asked, request.state.ignored), names)

        asked, (make_parser, body) = await parts.reader.read_with(request, MessagesRequest, learn, translated)
        events = MessageEvents(AnswerHead(f"msg_{body.request_id}", int(time.time())), make_parser())
        caller = parts.caller(request, asked.model)
        add: Translate[list[dict[str, Any]]] = events.add if asked.stream else kept(caller, events.add)
        batches = output(parts, caller, body, add)
        if not asked.stream:
            return JsonResponse(await while_connected(request.receive, _whole(batches)))

        def framed_error(error: ApiError) -> bytes:
            return framed_by_name(anthropic_error(error))

        return await named_events(parts, request, batches, framed_error)

    @router.post(
        "/v1/messages/count_tokens",
        responses={200: {"model": CountedTokens}, **errors(has_body=True)},
        openapi_extra=body_of(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        """Length of a conversation in tokens."""

        def translated(asked: CountTokensRequest) -> api.TokenizeRequest:
            chat = to_chat(asked, request.state.ignored)
            try:
                generate = chat_to_generate(chat.request)
            except InvalidRequest as error:
                raise chat.as_written(error) from None
            return api.TokenizeRequest(model=asked.model, messages=generate.messages)

        request.state.field_names = CHAT_FIELD_NAMES
        _, body = await parts.reader.read(request, CountTokensRequest, translated)
        answer = await while_connected(request.receive, parts.caller(request, body.model).call("Tokenize", body))
        return JsonResponse({"input_tokens": len(answer.token_ids)})

    return router


async def _whole(batches: AsyncGenerator[Sequence[Event], None]) -> object:
    async with aclosing(batches) as all_of:
        return whole_message([dict(event) async for events in all_of for event in events])
