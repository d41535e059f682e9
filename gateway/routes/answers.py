"""JSON answers, and the common parts of /openapi.json."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from specdec.gateway.api.errors import ApiError, ErrorAnswer
from specdec.gateway.http.events import encoded
from specdec.gateway.http.sent import ANTHROPIC_PATHS


class JsonResponse(Response):
    """An answer that orjson encodes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return encoded(content)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status; others are invalid_request_error below 500, and api_error above."""


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it."""
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    told = {"type": _ANTHROPIC_TYPES.get(error.status, usual), "message": too_long + error.message}
    return {"type": "error", "error": told}


def error_response(error: ApiError, headers: dict[str, str] | None = None, *, path: str = "") -> JsonResponse:
    """The answer for an error, in the form of the API that the path belongs to."""
    body = anthropic_error(error) if path.startswith(ANTHROPIC_PATHS) else error.body
    return JsonResponse(body, status_code=error.status, headers={**(headers or {}), **error.headers})


_CAUSES = {
    400: "The request is invalid or asks for an unsupported feature.",
    401: "The API key is missing or unknown.",
    403: "The API key may not do this.",
    404: "The model is not served.",
    408: "The body was not complete in time.",
    409: "A request with this id is running.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests, or a quota is used up; retry-after says when to try again.",
    431: "Keys and tenant are too long.",
    500: "A fault of the service; its log has the cause under the message's id.",
    501: "The coordinator does not support it.",
    503: "No coordinator or target can serve the request now; retry-after says when to try again.",
    504: "A deadline has passed.",
}
_WITH_BODY = (408, 413, 415)


def errors(*, has_body: bool) -> dict[int | str, dict[str, Any]]:
    """The answers other than 200, for /openapi.json."""
    return {
        status: {"model": ErrorAnswer, "description": cause}
        for status, cause in _CAUSES.items()
        if has_body or status not in _WITH_BODY
    }


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The /openapi.json entry of a body that the route reads itself."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streams(whole: type[BaseModel], event: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The answer 200 of a route that can stream."""
    data = {
        "type": "string",
        "anyOf": [
            {"const": "[DONE]", "description": "The last event of completions and chats."},
            {
                "contentMediaType": "application/json",
                "contentSchema": {"$ref": f"#/components/schemas/{event.__name__}"},
            },
        ],
    }
    schema = {"type": "object", "required": ["data"], "properties": {"data": data, "event": {"type": "string"}}}
    content = {"text/event-stream": {"schema": schema}}
    return {200: {"model": whole, "description": "The answer, or a stream of its pieces.", "content": content}}
