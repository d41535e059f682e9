"""GET /: the page that shows speculation in the open. It calls the other routes like any client.

One file that loads nothing, assembled from `gateway/page/files`, with a policy that allows only it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

SCRIPTS = ("text.js", "stream.js", "run.js", "tree.js", "view.js", "app.js")
"""Scripts in the order of their imports, which one script does not need."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/html": {"schema": {"type": "string"}}}},
    304: {"description": "Unchanged."},
}


@dataclass(frozen=True, slots=True)
class Page:
    """The page with its headers."""

    html: bytes
    etag: str
    policy: str
    """Content-Security-Policy: only this script, this style and calls to this origin."""


def assembled() -> Page:
    """Assemble the page. Cost: some milliseconds."""
    style = _source("page.css")
    script = "".join(_EXPORT.sub("", _IMPORT.sub("", _source(name))) for name in SCRIPTS)
    text = _source("index.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    html = text.encode()
    return Page(html, f'"{hashlib.sha256(html).hexdigest()[:32]}"', _policy(script, style))


def _source(name: str) -> str:
    return files("specdec.gateway.page").joinpath("files", name).read_text("utf-8")


def _policy(script: str, style: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_routes() -> APIRouter:
    """The route of the page."""
    router = APIRouter(tags=["page"])
    page = assembled()

    @router.get("/", response_class=HTMLResponse, responses=_ANSWERS)
    async def show_page(request: Request) -> Response:
        """The page."""
        return _answer(page, request)

    return router


def _answer(page: Page, request: Request) -> Response:
    headers = {
        "etag": page.etag,
        "cache-control": "no-cache",
        "content-security-policy": page.policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }
    if page.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(page.html, media_type="text/html", headers=headers)
