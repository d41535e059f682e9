"""Reads a request's JSON within bounds: of size, of time and of depth."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from specdec.gateway.api.errors import ApiError, invalid
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.problems import validated

M = TypeVar("M", bound=RequestModel)
_MOST_DEPTH = 64
"""Of objects and lists in each other: deep schemas of tools have twenty."""


_MOST_FIELDS = 16 * 1024
"""Of one object: each that is unknown is looked at before the first is told."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may be."""

    max_bytes: int
    read_s: float
    """From its headers to its last byte."""


class BodyReader:
    """Turns the bodies of requests into checked models."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits

    async def read(self, request: Request, model: type[M]) -> M:
        """The request's body. Raises ApiError for whatever is wrong with it, ClientDisconnect if it ends too early."""
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
        try:
            async with asyncio.timeout(self._limits.read_s):
                data = await self._bytes(request)
        except TimeoutError:
            message = f"the body was not sent within {self._limits.read_s:g} s"
            raise ApiError(408, message, code="request_timeout") from None
        return validated(model, parsed(data))

    async def _bytes(self, request: Request) -> bytes:
        most = self._limits.max_bytes
        told = request.headers.get("content-length", "0")
        if told.isdecimal() and int(told) > most:
            raise _too_large(most)
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > most:
                raise _too_large(most)
        return bytes(data)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")


def parsed(data: bytes) -> Any:
    """The value of a JSON text. Raises ApiError if it is none, is not UTF-8, or is nested too deeply."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    # What has few brackets is neither deep nor large in its objects, and millions of numbers are not looked at.
    if data.count(b":") > _MOST_FIELDS or data.count(b"[") + data.count(b"{") > _MOST_DEPTH:
        _check_shape(value)
    return value


def _check_shape(value: Any) -> None:
    level = [value]
    for _ in range(_MOST_DEPTH):
        if any(len(parent) > _MOST_FIELDS for parent in level if isinstance(parent, dict)):
            raise invalid(None, f"an object of the body has more than {_MOST_FIELDS} fields", "invalid_json")
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise invalid(None, f"the body is nested more than {_MOST_DEPTH} deep", "invalid_json")


__all__ = ["BodyLimits", "BodyReader", "ClientDisconnect", "parsed"]
