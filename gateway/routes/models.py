"""GET /v1/models and /v1/models/ID."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from specdec.gateway.api.answers import ModelCard, ModelList
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.problems import short
from specdec.gateway.parts import Parts
from specdec.gateway.routes.answers import JsonResponse, errors
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Unavailable

_ANTHROPIC_HEADER = "anthropic-version"


def model_routes(parts: Parts) -> APIRouter:
    """The routes of the served model."""
    router = APIRouter(tags=["models"])
    known: dict[str, tuple[str, int | None]] = {}
    """Name and context of models that were asked for, by entry."""

    @router.get("/v1/models", responses={200: {"model": ModelList}, **errors(has_body=False)})
    async def list_models(request: Request) -> JsonResponse:
        """The served models, and those that requests would start; none that does not answer or refuses the key."""
        found = await asyncio.gather(
            *(_card(parts, request, model, known) for model in parts.coordinators.models), return_exceptions=True
        )
        cards = {card["id"]: card for card in found if not isinstance(card, BaseException)}
        if not cards:
            raise next(error for error in found if isinstance(error, BaseException))
        told: dict[str, Any] = {"object": "list", "data": list(cards.values())}
        if _ANTHROPIC_HEADER in request.headers:
            told |= {"has_more": False, "first_id": next(iter(cards)), "last_id": next(reversed(cards))}
        return JsonResponse(told)

    @router.get("/v1/models/{model:path}", responses={200: {"model": ModelCard}, **errors(has_body=False)})
    async def retrieve_model(request: Request, model: str) -> JsonResponse:
        """One model."""
        card = await _card(parts, request, model, known)
        if card["id"] != model:
            raise ApiError(404, f"the model {short(model)} is not served here", param="model", code="model_not_found")
        return JsonResponse(card)

    return router


async def _card(parts: Parts, request: Request, model: str, known: dict[str, tuple[str, int | None]]) -> dict[str, Any]:
    """A model as OpenAI's clients read it, and Anthropic's if one of them asks. The question starts no model."""
    entry = parts.coordinators.serving(model)
    try:
        info = await parts.caller(request, model, holds=False).call("GetModelInfo", api.GetModelInfoRequest())
        known[entry] = info.target.name, info.max_model_len
    except Unavailable:
        if not parts.health.hold.holds or not (entry or entry in known):
            raise
    name, max_model_len = known.get(entry, (entry, None))
    more: dict[str, Any] = {}
    if _ANTHROPIC_HEADER in request.headers:
        created = datetime.fromtimestamp(parts.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        more = {"type": "model", "display_name": name, "created_at": created}
    return {
        **more,
        "id": name,
        "object": "model",
        "created": parts.created_s,
        "owned_by": "specdec",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
    }
