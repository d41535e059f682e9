"""POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import MappingProxyType

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.responses import ResponseAnswer, ResponseEvent, ResponsesRequest
from specdec.gateway.http.edge import NOT_ENFORCED, tell_names
from specdec.gateway.http.events import Event, EventStream, begun, framed_by_name, while_connected
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import JsonResponse, body_of, errors, streams
from specdec.gateway.routes.output import kept, new_id, output, stream_error
from specdec.gateway.translation.chat_request import CHAT_FIELD_NAMES, parsers
from specdec.gateway.translation.head import AnswerHead
from specdec.gateway.translation.response_answer import ResponseEvents
from specdec.gateway.translation.response_request import SCHEMA_FIELD, response_to_chat, response_to_generate
from specdec.gateway.upstream.coordinators import CallerStub
from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import coordinator_pb2 as api

_CONSTRAINT_NAMES = {
    **dict.fromkeys(("constraint", "constraint.after_token"), "text.format"),
    "constraint.json_schema": SCHEMA_FIELD,
}
_NAMES = MappingProxyType(
    {**CHAT_FIELD_NAMES, "max_tokens": "max_output_tokens", "messages": "input", **_CONSTRAINT_NAMES}
)


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
        request.state.field_names = _NAMES
        unenforced: list[str] = []

        async def learn(asked: ResponsesRequest) -> str:
            return (await parts.parsers_of(request, asked.model)).reasoning

        def translated(asked: ResponsesRequest, reasoning: str) -> tuple[str, ChatRequest, api.GenerateRequest]:
            chat = response_to_chat(asked)
            return reasoning, chat, response_to_generate(asked, chat, reasoning, unenforced)

        asked, (reasoning, chat, body) = await parts.reader.read_with(request, ResponsesRequest, learn, translated)
        tell_names(request, NOT_ENFORCED, unenforced)
        body.request_id = new_id(None)
        make_parser = parsers(chat, reasoning, "none")
        events = ResponseEvents(asked, AnswerHead(f"resp_{body.request_id}", int(time.time())), make_parser())
        batches = _batches(parts, parts.caller(request, asked.model), body, events)
        if not asked.stream:
            return JsonResponse(await while_connected(request.receive, _last(batches)))

        def framed_error(error: ApiError) -> bytes:
            told = {"code": error.code, "message": error.message, "param": error.param}
            return framed_by_name({"type": "error", "sequence_number": events.num_events, **told})

        return EventStream(
            await while_connected(request.receive, begun(batches)),
            on_error=stream_error(parts, _NAMES),
            keep_alive_s=parts.settings.keep_alive_s,
            frame=framed_by_name,
            frame_error=framed_error,
            last=b"",
        )

    return router


def _batches(
    parts: Parts, caller: CallerStub, body: api.GenerateRequest, events: ResponseEvents
) -> AsyncGenerator[Sequence[Event], None]:
    held: list[Event] = []

    def told(chunk: api.GenerateResponse, texts: TokenTexts) -> list[Event]:
        """The first events wait for output: errors before it become answers with a status."""
        nonlocal held
        held += events.add(chunk, texts)
        if chunk.WhichOneof("chunk") == "started":
            return []
        batch, held = held, []
        return batch

    # A stream's last event has the whole answer, too.
    return output(parts, caller, body, kept(caller, told))


async def _last(batches: AsyncGenerator[Sequence[Event], None]) -> object:
    """The whole answer, from the last event."""
    whole: object = None
    async with aclosing(batches) as all_of:
        async for events in all_of:
            whole = events[-1].get("response", whole)
    return whole
