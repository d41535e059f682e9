"""The application: all routes, and the answers to errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from specdec import __version__
from specdec.gateway.anthropic.request import CountTokensRequest, MessagesRequest
from specdec.gateway.api.answers import ChatCompletionChunk
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.tokens import DetokenizeBody, TokenizeBody
from specdec.gateway.parts import Parts
from specdec.gateway.responses.request import ResponseEvent, ResponsesRequest
from specdec.gateway.routes.answers import error_response
from specdec.gateway.routes.chat import chat_routes
from specdec.gateway.routes.completions import completion_routes
from specdec.gateway.routes.messages import MessageEvent, message_routes
from specdec.gateway.routes.models import model_routes
from specdec.gateway.routes.operations import health_routes, metrics_routes
from specdec.gateway.routes.output import as_api_error
from specdec.gateway.routes.page import page_routes
from specdec.gateway.routes.responses import response_routes
from specdec.gateway.routes.tokens import token_routes
from specdec.wire.errors import SpecdecError

_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_DESCRIBED: tuple[type[BaseModel], ...] = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, TokenizeBody, DetokenizeBody),
    *(MessagesRequest, CountTokensRequest, ChatCompletionChunk, ResponseEvent, MessageEvent),
)
"""Models that FastAPI's routes do not name: bodies, which our reader parses, and events."""
_MOST_SHOWN_CHARS = 200
_API_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
)
"""Paths that clients put together from a base URL."""
_COMPONENT = "#/components/schemas/{model}"


def build_app(parts: Parts) -> FastAPI:
    """Build the application of a gateway."""
    path = "/openapi.json" if parts.settings.trusts_network else None
    app = FastAPI(
        title="specdec gateway", version=__version__, openapi_url=path,
        docs_url=None, redoc_url=None, redirect_slashes=False,
    )  # fmt: skip
    own = (chat_routes, completion_routes, response_routes, message_routes, model_routes, token_routes, health_routes)
    for routes in own:
        app.include_router(routes(parts))
    if parts.settings.serves_metrics:
        app.include_router(metrics_routes(parts))
    if parts.settings.page:
        app.include_router(page_routes())
    _answer_errors(app)
    described = _openapi(app, ignores_unknown=parts.settings.unknown_fields == "ignore")
    app.openapi = lambda: described  # type: ignore[method-assign]
    return app


def build_health_app(parts: Parts) -> FastAPI:
    """Build the application of the port for probes."""
    app = FastAPI(title="specdec gateway health", openapi_url=None, redirect_slashes=False)
    app.include_router(health_routes(parts))
    _answer_errors(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(SpecdecError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_error)


async def _on_error(request: Request, error: Exception) -> Response:
    told = as_api_error(error, getattr(request.state, "field_names", _NO_NAMES))
    return error_response(told, path=request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer the router's refusals."""
    if not isinstance(error, HTTPException):
        raise error
    if request.method == "OPTIONS" and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Response(status_code=204, headers={"allow": f"{allowed}, OPTIONS"})
    path = f"{request.method[:_MOST_SHOWN_CHARS]} {request.url.path[:_MOST_SHOWN_CHARS]}"
    message = f"Method not allowed: {path}."
    if error.status_code == 404:
        message = f"Unknown request URL: {path}.{_meant(request.url.path)}"
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    told = ApiError(error.status_code, message, code=codes.get(error.status_code))
    return error_response(told, dict(error.headers or {}), path=request.url.path)


def _meant(path: str) -> str:
    """A hint for a base URL that has /v1 twice, lacks it, or has more before it."""
    meant = next((one for one in _API_PATHS if path.rstrip("/").endswith(one.removeprefix("/v1"))), None)
    return "" if meant is None else f" Did you mean {meant}?"


async def _on_gone(request: Request, _error: Exception) -> Response:
    """Answer a client that has left; nobody reads it."""
    request.state.is_client_gone = True
    return Response(status_code=499)


def _openapi(app: FastAPI, *, ignores_unknown: bool) -> dict[str, Any]:
    """The OpenAPI description, with the bodies that routes read themselves, without FastAPI's own error answers."""
    described = FastAPI.openapi(app)
    _, schemas = models_json_schema([(model, "validation") for model in _DESCRIBED], ref_template=_COMPONENT)
    components = described.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in schemas.get("$defs", {}).items():
        components.setdefault(name, schema)
    for schema in components.values():
        if ignores_unknown and schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
    for made_up in ("HTTPValidationError", "ValidationError"):
        components.pop(made_up, None)
    for path in described["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return described
