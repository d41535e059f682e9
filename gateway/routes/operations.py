"""GET /health, /ping, /version and /metrics: for probes and operators, without a key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from specdec import __version__
from specdec.gateway.api.answers import VersionAnswer
from specdec.gateway.api.errors import SERVER_ERROR, ApiError, ErrorAnswer
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import JsonResponse

_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorAnswer, "description": "The gateway is shutting down, or no coordinator serves."}
}


def health_routes(parts: Parts) -> APIRouter:
    """The routes of probes."""
    router = APIRouter(tags=["operation"])

    @router.get("/health", response_class=Response, responses=_NOT_READY)
    async def health() -> Response:
        """200 if a request can be served now."""
        return await _health(parts)

    @router.get("/ping", response_class=Response, responses=_NOT_READY)
    async def ping() -> Response:
        """The same as /health."""
        return await _health(parts)

    @router.get("/version", responses={200: {"model": VersionAnswer}})
    async def version() -> JsonResponse:
        """The software's version."""
        return JsonResponse({"version": __version__})

    return router


def metrics_routes(parts: Parts) -> APIRouter:
    """The route of Prometheus."""
    router = APIRouter(tags=["operation"])

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(parts.registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _health(parts: Parts) -> Response:
    if not parts.health.hold.holds:  # Held requests wait for this knowledge, too.
        parts.openness.check()
    if not await parts.health.is_ready():
        why = "the gateway is shutting down" if parts.health.is_draining else "no coordinator serves"
        raise ApiError(503, why, type=SERVER_ERROR, code="service_unavailable", retry_after_s=0.0)
    return Response(status_code=200)
