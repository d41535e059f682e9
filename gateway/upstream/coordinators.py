"""Several coordinators as one: calls take turns among those of a model, and move on if one does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import structlog
from google.protobuf.message import Message

from specdec.client import Client, ResumePolicy, generate_resuming
from specdec.service.byte_budget import Held
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import PermissionDenied, SpecdecError, Unauthenticated, Unavailable

_AVOID_S = 2.0
"""Seconds for which a coordinator that did not answer is tried last."""
_LOOK_S = 2.0
"""Seconds between two questions to each coordinator whether it still hears."""
_HEARS_S = 4.0
"""Seconds for its answer. Keepalive does not notice a connection that loses one direction only: now and then something
arrives, by which the silence begins anew."""
_STOOD_STILL_S = 1.0
"""Seconds that a question may take beyond its time before the gateway itself counts as having stood still."""
_LONGEST_CALL_S = 24 * 3600.0
"""Seconds before a call on a replaced connection is cut off; it resumes on another one."""
_log = structlog.get_logger(__name__)
Metadata = tuple[tuple[str, str], ...]
"""Metadata of a caller's calls: its key, its trace."""
_BELIEVED_S = 0.5
"""Seconds for which an answer is reused: probes are frequent, and each calls every coordinator."""


@dataclass(slots=True)
class _Member:
    client: Client
    avoid_until_s: float = 0.0
    """Monotonic time."""


@dataclass(slots=True)
class _Turns:
    members: Sequence[_Member]
    turn: int = field(default=0)
    templates: dict[str, str] = field(default_factory=dict)
    """The coordinator that first told a chat template, by the template's digest."""
    shares: Mapping[str, int] = field(default_factory=dict)
    """Percent of the requests, by address; members of other addresses share the rest, under an empty address."""
    _owed: dict[str, int] = field(default_factory=dict)
    """Percent of a request, by address, that it lacks to its share."""

    def next_release(self) -> str:
        """The address that is to have the next request, or the empty one; each gets exactly its share."""
        shares = {**self.shares, "": 100 - sum(self.shares.values())}
        for address, percent in shares.items():
            self._owed[address] = self._owed.get(address, 0) + percent
        chosen = max(self._owed, key=self._owed.__getitem__)
        self._owed[chosen] -= 100
        return chosen

    def order(self, release: str = "") -> list[_Member]:
        """All members: the next one of a release first; those of others, those without a connection and those that did
        not answer lately last."""
        self.turn = (self.turn + 1) % len(self.members)
        rotated = [*self.members[self.turn :], *self.members[: self.turn]]
        now_s = time.monotonic()

        def rank(member: _Member) -> tuple[bool, bool, bool]:
            address = member.client.address
            is_other = (address if address in self.shares else "") != release
            return member.avoid_until_s > now_s, is_other, not member.client.is_connected

        return sorted(rotated, key=rank)

    def learn(self, address: str, template: str) -> None:
        """A coordinator has told the digest of its chat template; each that differs from the first is logged once."""
        if template and template not in self.templates:
            self.templates[template] = address
            if len(self.templates) > 1:
                remedy = "give all targets the same chat template, and restart the coordinators"
                risk = "what a conversation becomes depends on the coordinator"
                _log.error("chat_templates_differ", coordinators=self.templates, risk=risk, remedy=remedy)


class Coordinators:
    """All coordinators, each with its own connection, which `connect` opens."""

    def __init__(
        self,
        connect: Callable[[str], Client],
        addresses: Mapping[str, Sequence[str]],
        on_failover: Callable[[], None],
        shares: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Connect lazily.

        Args:
            connect: makes a client of an address, inside the event loop.
            addresses: host:port, or dns:///name:port, by the name of the model; under the empty name those for all
                other names. One at least of each.
            on_failover: called when a call moves to another coordinator.
            shares: percent of a model's requests that go to an address, by the model's name and the address.
        """
        self._connect = connect
        self._turns = {
            name: _Turns([_Member(connect(each)) for each in own], shares=(shares or {}).get(name, {}))
            for name, own in addresses.items()
        }
        self._closing: set[asyncio.Task[None]] = set()
        self._on_failover = on_failover

    @property
    def models(self) -> Sequence[str]:
        """The names of models that have coordinators of their own, and the empty name."""
        return list(self._turns)

    def serving(self, model: str) -> str:
        """The entry of `models` whose coordinators are asked for a model."""
        return model if model in self._turns else ""

    def caller(self, metadata: Metadata, held: Held, model: str = "") -> CallerStub:
        """The coordinators of a model with one caller's metadata, and the bytes that its request holds."""
        return CallerStub(self._turns[self.serving(model)], metadata, held, self._on_failover)

    async def any_serves(self) -> bool:
        """Whether any coordinator reports SERVING. Takes about a second at most."""
        answers = await asyncio.gather(*(member.client.is_serving() for member in self._members()))
        return any(answers)

    async def keyless(self, timeout_s: float) -> dict[str, bool]:
        """Whether callers need no key, by address, of the coordinators that answer within `timeout_s`."""
        members = self._members()
        told = await asyncio.gather(*(_needs_no_key(member.client, timeout_s) for member in members))
        return {
            member.client.address: answer for member, answer in zip(members, told, strict=True) if answer is not None
        }

    async def watch(self, num_behind: Callable[[str], int]) -> None:
        """Replace connections over which a coordinator hears nothing, while its model has others; its streams resume.

        `num_behind`: coordinators at an address, which may be a name.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            listened = [
                member
                for turns in self._turns.values()
                if sum(num_behind(member.client.address) for member in turns.members) > 1
                for member in turns.members
            ]
            await asyncio.gather(*(self._listen_to(member) for member in listened))

    async def _listen_to(self, member: _Member) -> None:
        client, began_s = member.client, time.monotonic()
        is_deaf = await client.is_deaf(_HEARS_S)
        stood_still = time.monotonic() - began_s > _HEARS_S + _STOOD_STILL_S
        if is_deaf and not stood_still and member.client is client:
            member.client, member.avoid_until_s = self._connect(client.address), time.monotonic() + _AVOID_S
            _log.warning("coordinator_deaf", address=client.address, seconds=_HEARS_S)
            await client.close()

    async def renew(self, connect: Callable[[str], Client]) -> None:
        """Replace all connections, as when TLS files have changed. Streams of the old ones resume."""
        for member in self._members():
            former, member.client = member.client, connect(member.client.address)
            await former.close()

    async def look_again(self, connect: Callable[[str], Client], address: str) -> None:
        """Resolve a name again for new calls; running calls stay where they are."""
        for member in self._members():
            if member.client.address == address:
                former, member.client = member.client, connect(address)
                closing = asyncio.create_task(former.close(_LONGEST_CALL_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def _members(self) -> list[_Member]:
        return [member for turns in self._turns.values() for member in turns.members]

    async def close(self) -> None:
        """Close all connections; running calls are cancelled."""
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for member in self._members():
            await member.client.close()


class CallerStub:
    """Calls of one caller. Every method raises the typed errors of `specdec.wire.errors`."""

    def __init__(self, turns: _Turns, metadata: Metadata, held: Held, on_failover: Callable[[], None]) -> None:
        self.held = held
        self._turns = turns
        self._release: str | None = None
        self._metadata = metadata
        self._on_failover = on_failover

    def stream(self, request: api.GenerateRequest) -> AsyncGenerator[api.GenerateResponse, None]:
        """The chunks of a request, resumed if a coordinator fails.

        The caller must close it, which cancels the request.
        """
        return generate_resuming(self, request, ResumePolicy())

    async def generate(self, request: api.GenerateRequest) -> AsyncGenerator[api.GenerateResponse, None]:
        """The chunks of one attempt, from the first coordinator that answers."""
        if self._release is None:  # A request stays at its release: another one may not take up its stream.
            self._release = self._turns.next_release()
        members = self._turns.order(self._release)
        for number, member in enumerate(members):
            has_begun = False
            try:
                async with aclosing(self._client(member).generate(request)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        if chunk.HasField("started"):
                            self._turns.learn(member.client.address, chunk.started.chat_template_digest)
                        yield chunk
                return
            except Unavailable as error:
                self._avoid(member, error)
                if has_begun or error.has_waited or number == len(members) - 1:
                    raise

    async def call(self, method: str, request: Message) -> Any:
        """The answer to a unary call, from the first coordinator that answers."""
        members = self._turns.order(self._release or "")
        for member in members[:-1]:
            try:
                return await self._client(member).call(method, request)
            except Unavailable as error:
                self._avoid(member, error)
                if error.has_waited:
                    raise
        return await self._client(members[-1]).call(method, request)

    def _client(self, member: _Member) -> Client:
        return member.client.on_behalf_of(self._metadata)

    def _avoid(self, member: _Member, error: Unavailable) -> None:
        member.avoid_until_s = time.monotonic() + _AVOID_S
        _log.info("coordinator_failed", address=member.client.address, reason=error.reason, error=error.message)
        self._on_failover()


async def _needs_no_key(client: Client, timeout_s: float) -> bool | None:
    """Whether a coordinator serves a caller without a key; None: it did not say."""
    try:
        async with asyncio.timeout(timeout_s):
            await client.status()
    except (Unauthenticated, PermissionDenied):
        return False
    except (SpecdecError, TimeoutError):
        return None
    return True


class Health:
    """Whether the gateway can serve: it does not drain, and a coordinator serves. Asks at most twice a second."""

    def __init__(self, coordinators: Coordinators) -> None:
        self._coordinators = coordinators
        self._lock = asyncio.Lock()
        self._asked_s = -_BELIEVED_S
        self._serves = False
        self.is_draining = False
        """New requests are refused."""

    async def is_ready(self) -> bool:
        """Whether a request can be served now."""
        if self.is_draining:
            return False
        async with self._lock:
            if time.monotonic() - self._asked_s >= _BELIEVED_S:
                self._serves = await self._coordinators.any_serves()
                self._asked_s = time.monotonic()
        return self._serves
