"""Translate a request of /v1/responses to a chat request."""

from __future__ import annotations

import re
from typing import Any

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import ApiError, invalid, unsupported
from specdec.gateway.api.fields import JsonSchema, JsonSchemaFormat, ResponseFormat
from specdec.gateway.api.responses import ResponseSchema, ResponsesRequest
from specdec.gateway.translation import constraint as chat_constraint
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

SCHEMA_FIELD = "text.format.schema"
_INDEX = re.compile(r"messages\[(\d+)\]")
_SAME_NAMES = (
    *("model", "temperature", "top_p", "top_logprobs", "stream", "seed", "top_k", "min_p", "stop"),
    *("speculation", "chat_template_kwargs", "cache_salt", "return_token_origins", "return_steps"),
)


def response_to_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat with the same output. Raises ApiError."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAMES}
    return ChatRequest.model_construct(
        **fields,
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.top_logprobs is not None,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        include_reasoning=False,
        response_format=_format(request),
    )


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if request.text is None else request.text.format
    if not isinstance(wanted, ResponseSchema):
        return wanted
    schema = JsonSchema.model_construct(name=wanted.name, schema_=wanted.schema_, strict=wanted.strict)
    return JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)


def response_to_generate(
    request: ResponsesRequest, chat: ChatRequest, reasoning_parser: str = "none", unenforced: list[str] | None = None
) -> api.GenerateRequest:
    """The gRPC request without an id; the reasoning parser reads its output.

    `unenforced` gets the paths of a schema's keywords that are not enforced.

    Raises:
        ApiError: names the field of the /v1/responses request.
    """
    paths: list[str] = []
    try:
        body = chat_to_generate(chat, reasoning_parser=reasoning_parser, unenforced=paths)
    except InvalidRequest as error:
        raise _as_written(request, error) from None
    if unenforced is not None:
        unenforced += [path.replace(chat_constraint.SCHEMA_FIELD, SCHEMA_FIELD, 1) for path in paths]
    return body


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    own = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        return [*own, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        if item.get("type", "message") != "message":
            raise unsupported(f"input[{index}].type", "only messages are supported")
    return [*own, *request.input]


def _as_written(request: ResponsesRequest, error: InvalidRequest) -> ApiError:
    shift = request.instructions is not None

    def renamed(match: re.Match[str]) -> str:
        index = int(match[1]) - shift
        if index < 0:
            return "instructions"
        return "input" if isinstance(request.input, str) else f"input[{index}]"

    field = error.field.replace(chat_constraint.SCHEMA_FIELD, SCHEMA_FIELD, 1)
    return invalid(_INDEX.sub(renamed, field), error.description, "invalid_value")
