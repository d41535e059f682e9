"""Read a request's JSON within bounds of size, time and parsing cost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from specdec.gateway.api.errors import ApiError, cut
from specdec.gateway.api.fields import RequestModel
from specdec.gateway.api.problems import validated
from specdec.gateway.http.edge import IGNORED, tell_names
from specdec.gateway.http.json_reader import parsed

M = TypeVar("M", bound=RequestModel)
L = TypeVar("L")
T = TypeVar("T")
_INLINE_BYTES = 16 * 1024
"""Bytes of a body read in the event loop: more would hold up other streams for several milliseconds."""
_PATIENCE_S = 10.0
"""Seconds after which a body must have come at `_LEAST_BYTES_PER_S`."""
_LEAST_BYTES_PER_S = 4096


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a body."""

    max_bytes: int
    read_s: float
    """Seconds from its headers to its last byte."""


class BodyReader:
    """Turns the bodies of requests into checked models."""

    def __init__(self, limits: BodyLimits, *, ignores_unknown: bool) -> None:
        """`ignores_unknown`: unknown fields are ignored and named in the answer; else they are refused."""
        self._limits = limits
        self._ignores_unknown = ignores_unknown
        # One thread: the interpreter runs one at a time, and waiting bodies are not parsed yet.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    def close(self) -> None:
        """End the thread without waiting for its work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: Request, model: type[M], translate: Callable[[M], T]) -> tuple[M, T]:
        """The request's body, and the result of `translate`, in a thread if the body is long.

        `request.state.ignored` gets the paths of unknown fields for the answer's header; None: they are refused.

        Raises ApiError if the body is invalid, ClientDisconnect if it ends too early, and the errors of `translate`.
        """

        async def nothing(_: M) -> None:
            return None

        return await self.read_with(request, model, nothing, lambda asked, _: translate(asked))

    async def read_with(
        self,
        request: Request,
        model: type[M],
        learn: Callable[[M], Awaitable[L]],
        translate: Callable[[M, L], T],
    ) -> tuple[M, T]:
        """As `read`, with what `learn` finds out for the body before it is translated. Raises its errors, too."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            message = f"content-encoding {cut(encoding)!r} is not supported: send the body uncompressed"
            raise ApiError(415, message, param="content-encoding", code="unsupported_media_type")
        try:
            async with asyncio.timeout(self._limits.read_s):
                data = await self._bytes(request)
        except TimeoutError:
            message = f"the body was not complete within {self._limits.read_s:g} s"
            raise ApiError(408, message, code="request_timeout") from None
        held = [data]
        is_short = len(data) <= _INLINE_BYTES
        del data

        ignored: list[str] | None = [] if self._ignores_unknown else None
        request.state.ignored = ignored

        def understood() -> M:
            return validated(model, parsed(held.pop(), model.token_fields, model.large_fields), ignored)

        try:
            asked = await self._worked(understood, is_short)
            learned = await learn(asked)
            return asked, await self._worked(lambda: translate(asked, learned), is_short)
        finally:
            tell_names(request, IGNORED, ignored or ())

    async def _worked(self, work: Callable[[], T], is_short: bool) -> T:
        if is_short:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, _without_collections, work)

    async def _bytes(self, request: Request) -> bytearray:
        most = self._limits.max_bytes
        told = request.headers.get("content-length", "0")
        if told.isdecimal() and int(told) > most:
            raise _too_large(most)
        data = bytearray()
        held = request.scope["state"]["held"]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        pieces = aiter(request.stream())
        while True:
            # Progress is asked for: a body that dribbles holds its place for `_PATIENCE_S`, not for `read_s`.
            due_s = began_s + _PATIENCE_S + len(data) / _LEAST_BYTES_PER_S
            try:
                async with asyncio.timeout_at(due_s):
                    piece = await anext(pieces, None)
            except TimeoutError:
                message = f"the body comes slower than {_LEAST_BYTES_PER_S} bytes/s after {_PATIENCE_S:g} s"
                raise ApiError(408, message, code="request_timeout") from None
            if piece is None:
                return data
            held.grow(len(piece))
            data += piece
            if len(data) > most:
                raise _too_large(most)


def _without_collections(work: Callable[[], T]) -> T:
    """Run without garbage collection: bodies have no cycles, and each collection would hold up the event loop."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return work()
    finally:
        if was_enabled:
            gc.enable()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")


__all__ = ["BodyLimits", "BodyReader", "ClientDisconnect"]
