"""GET /: the page that shows speculation in the open. It calls the other routes like any client."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from specdec.gateway.page.assembly import Page, assembled

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/html": {"schema": {"type": "string"}}}},
    304: {"description": "Unchanged."},
}


def page_routes() -> APIRouter:
    """The route of the page."""
    router = APIRouter(tags=["page"])
    page = assembled()

    @router.get("/", response_class=HTMLResponse, responses=_ANSWERS)
    async def show_page(request: Request) -> Response:
        """The page."""
        return _answer(page, request)

    router.add_api_route("/", show_page, methods=["HEAD"], include_in_schema=False)
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
