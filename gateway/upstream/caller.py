"""Calls to the coordinators of a model in one caller's name."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any

import structlog
from google.protobuf.message import Message

from specdec.client import Client, ResumePolicy, generate_resuming
from specdec.client.settings import MOST_ATTEMPTS, RETRY_WAITS
from specdec.gateway.upstream.beginning import key_of
from specdec.gateway.upstream.hold import Hold, Waits
from specdec.gateway.upstream.turns import Member, Turns
from specdec.service.byte_budget import Held
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import NotReady, Overloaded, Unavailable

_log = structlog.get_logger(__name__)
_NO_HOLD = Hold()
_ROUNDS, _BETWEEN_ROUNDS = MOST_ATTEMPTS, RETRY_WAITS
"""Times that all coordinators of a model are asked before a call fails, and the waits for those that start or drain.
gRPC's own retries would stay at one address: at one that is frozen each takes the time of a connection."""
_QUIET_S = 1.0
"""Seconds between two lines about one coordinator's failures: each stream that it served fails with it."""
Metadata = tuple[tuple[str, str], ...]
"""Metadata of a caller's calls: its key, its trace."""


class CallerStub:
    """Calls of one caller. Every method raises the typed errors of `specdec.wire.errors`."""

    def __init__(
        self, turns: Turns, metadata: Metadata, held: Held, on_failover: Callable[[], None], model: str = ""
    ) -> None:
        """Call nobody yet. `model`: the entry of the coordinators."""
        self.held = held
        self._turns = turns
        self._release: str | None = None
        self._metadata = metadata
        self._on_failover = on_failover
        self._model = model
        self._hold = _NO_HOLD
        self._arrived_s = float("-inf")
        self._check: Callable[[], None] = _allow
        self._failed: Member | None = None
        """Who did not answer last, or not to the end."""

    def wait_for_model(self, hold: Hold, arrived_s: float, check: Callable[[], None]) -> None:
        """Let calls wait while the model is not served.

        Args:
            hold: bounds the waits.
            arrived_s: monotonic time of the request's arrival; minus infinity: its calls do not wait.
            check: raises NotReady while nobody may be called.
        """
        self._hold, self._arrived_s, self._check = hold, arrived_s, check

    def stream(self, request: api.GenerateRequest) -> AsyncGenerator[api.GenerateResponse, None]:
        """The chunks of a request, resumed if a coordinator fails.

        The caller must close it, which cancels the request.
        """
        return generate_resuming(self, request, ResumePolicy())

    async def generate(self, request: api.GenerateRequest) -> AsyncGenerator[api.GenerateResponse, None]:
        """The chunks of one attempt, from the first coordinator that answers, or the second where one is full."""
        if self._release is None:  # A request stays at its release: another one may not take up its stream.
            self._release = self._turns.next_release()
        key = key_of(request, self._metadata)
        refusal: Overloaded | None = None
        with self._waits() as waits:
            for number_of_round in itertools.count(1):
                await self._allowed(waits)
                members, failure = self._turns.order(self._release, key), Unavailable("no coordinator answers")
                for number, member in enumerate(members):
                    is_last, has_begun = number == len(members) - 1, False
                    member.num_running += 1
                    try:
                        async with aclosing(self._client(self._next(member)).generate(request)) as chunks:
                            async for chunk in chunks:
                                if not has_begun:
                                    has_begun, self._failed = True, None
                                    waits.end()
                                if chunk.HasField("started"):
                                    self._turns.learn(member.client.address, chunk.started.chat_template_digest)
                                yield chunk
                        return
                    except Overloaded as error:
                        # A third is not asked: a full fleet must not be asked by each request for all its members.
                        if has_begun or is_last or refusal is not None or error.reason != Overloaded.default_reason:
                            raise
                        refusal = error
                    except Unavailable as error:
                        self._avoid(member, error)
                        if has_begun:
                            raise
                        if refusal is not None:
                            raise refusal from None
                        if error.has_waited or is_last:
                            failure = error
                            break
                    finally:
                        member.num_running -= 1
                await _until_next_round(number_of_round, failure, waits)

    async def call(self, method: str, request: Message) -> Any:
        """The answer to a unary call, from the first coordinator that answers."""
        with self._waits() as waits:
            for number_of_round in itertools.count(1):
                await self._allowed(waits)
                members, failure = self._turns.order(self._release or ""), Unavailable("no coordinator answers")
                for number, member in enumerate(members):
                    try:
                        answer = await self._client(self._next(member)).call(method, request)
                        self._failed = None
                        return answer
                    except Unavailable as error:
                        self._avoid(member, error)
                        if error.has_waited or number == len(members) - 1:
                            failure = error
                            break
                await _until_next_round(number_of_round, failure, waits)

    async def until_served(self) -> None:
        """Wait until the model is served, if requests are held. Raises Unavailable if it is not in time."""
        with self._waits() as waits:
            while not await self._turns.serves():
                await waits.after(Unavailable("no coordinator serves"))

    def _waits(self) -> AbstractContextManager[Waits]:
        return self._hold.call(self._model, self._arrived_s, self._turns.serves)

    async def _allowed(self, waits: Waits) -> None:
        """Wait until coordinators may be called."""
        while True:
            try:
                return self._check()
            except NotReady as error:
                await waits.after(error)

    def _client(self, member: Member) -> Client:
        return member.client.on_behalf_of(self._metadata)

    def _next(self, member: Member) -> Member:
        """Count a call that moves to another coordinator; returns it."""
        if self._failed is not None and self._failed is not member:
            self._on_failover()
        return member

    def _avoid(self, member: Member, error: Unavailable) -> None:
        self._turns.avoid(member)
        is_new, self._failed = self._failed is not member, member
        now_s = time.monotonic()
        if not is_new or now_s < member.tell_at_s:  # one of its own attempts after another says nothing new
            member.num_untold += is_new
            return
        untold, member.num_untold, member.tell_at_s = member.num_untold, 0, now_s + _QUIET_S
        address = member.client.address
        _log.info("coordinator_failed", address=address, reason=error.reason, error=error.message, untold=untold)


async def _until_next_round(num_rounds: int, failure: Unavailable, waits: Waits) -> None:
    """Wait before all coordinators are asked again. Raises `failure` if they are not."""
    if num_rounds < _ROUNDS and not failure.has_waited:
        await asyncio.sleep(_BETWEEN_ROUNDS.wait_s(num_rounds))
    else:
        await waits.after(failure)


def _allow() -> None:
    """Calls need no permission."""
