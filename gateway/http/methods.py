"""What browsers and probes ask besides GET and POST: questions of other origins' pages (CORS), and HEAD."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.gateway.http.edge import IGNORED, NOT_ENFORCED

_METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_SHOWN_HEADERS = ("x-request-id", "retry-after", "retry-after-ms", IGNORED, NOT_ENFORCED)
"""Headers of answers that pages may read."""
_BELIEVED_S = 600
"""Seconds that a browser may keep the answer to its question."""


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """An application whose answers, refusals included, pages of these origins may read; no origins: `app` itself.

    Credentials of browsers (cookies) are never allowed: keys travel in the header authorization.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
        max_age=_BELIEVED_S,
    )


def answering_head(app: ASGIApp) -> ASGIApp:
    """An application that answers HEAD as it answers GET; the server leaves the body out."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "HEAD":
            await app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"}
        try:
            await app(inner, receive, send)
        finally:
            scope["route"] = inner.get("route")

    return answer
