"""What requests of other protocols have in common: they are chats with other names, and their events have names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.requests import Request

from specdec.gateway.api.errors import ApiError
from specdec.gateway.chat.deltas import StreamingParser
from specdec.gateway.chat.template_parsers import ParserPair
from specdec.gateway.http.edge import NOT_ENFORCED, tell_names
from specdec.gateway.http.events import Event, EventStream, begun, framed_by_name, while_connected
from specdec.gateway.parts import Parts
from specdec.gateway.routes.output import new_id, stream_error
from specdec.gateway.translation.as_chat import AsChat
from specdec.gateway.translation.chat_request import chat_to_generate, parsers
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest


def generate_request(
    request: Request, chat: AsChat, names: ParserPair
) -> tuple[Callable[[], StreamingParser], api.GenerateRequest]:
    """The chat's request with a new id, and what makes its parser. The answer's headers name what is not enforced.

    Raises ApiError: names the client's field.
    """
    request.state.field_names = chat.field_names(names.tools)
    unenforced: list[str] = []
    try:
        make_parser = parsers(chat.request, names.reasoning, names.tools)
        body = chat_to_generate(chat.request, names.tools, names.reasoning, unenforced)
    except InvalidRequest as error:
        raise chat.as_written(error) from None
    tell_names(request, NOT_ENFORCED, [chat.path(path) for path in unenforced])
    body.request_id = new_id(None)
    return make_parser, body


async def named_events(
    parts: Parts,
    request: Request,
    batches: AsyncGenerator[Sequence[Event], None],
    frame_error: Callable[[ApiError], bytes],
) -> EventStream:
    """A stream of events with names, once the first batch is there. Raises SpecdecError."""
    return EventStream(
        await while_connected(request.receive, begun(batches)),
        on_error=stream_error(parts, request.state.field_names),
        keep_alive_s=parts.settings.keep_alive_s,
        frame=framed_by_name,
        frame_error=frame_error,
        last=b"",
    )
