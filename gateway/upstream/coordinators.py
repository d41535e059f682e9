"""Several coordinators as one: they are found one by one, and a call moves on if one does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from specdec.client import Client
from specdec.gateway.upstream.caller import CallerStub, Metadata
from specdec.gateway.upstream.hold import Hold
from specdec.gateway.upstream.turns import AVOID_S, Member, Turns
from specdec.service.byte_budget import Held
from specdec.wire.discovery import Discovery, ReplicaAddress, keep_finding
from specdec.wire.errors import PermissionDenied, SpecdecError, Unauthenticated
from specdec.wire.rendezvous import word

_LOOK_UP_S = 5.0
"""Seconds between two look-ups of names."""
_REACH_S = 1.0
"""Seconds that a starting gateway waits for its coordinators before it listens."""
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


class Coordinators:
    """All coordinators, each with its own connection, which `connect` opens."""

    def __init__(
        self,
        connect: Callable[[ReplicaAddress], Client],
        entries: Mapping[str, Sequence[str]],
        on_failover: Callable[[], None],
        shares: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Connect lazily; names are looked up by `keep_finding` only.

        Args:
            connect: makes a client of an address, inside the event loop.
            entries: host:port, or dns:///name:port for all addresses of a name, by the name of the model; under the
                empty name those for all other names. One at least of each.
            on_failover: called when a call moves to another coordinator.
            shares: percent of a model's requests that go to an entry, by the model's name and the entry.
        """
        self._connect = connect
        self._found = {entry: Discovery([entry]) for own in entries.values() for entry in own}
        self._entries = {name: list(dict.fromkeys(own)) for name, own in entries.items()}
        self._wanted = asyncio.Event()
        self._turns = {name: Turns([], self._wanted, shares=(shares or {}).get(name, {})) for name in entries}
        self._closing: set[asyncio.Task[None]] = set()
        self._on_failover = on_failover
        self._take()

    @property
    def models(self) -> Sequence[str]:
        """The names of models that have coordinators of their own, and the empty name."""
        return list(self._turns)

    def serving(self, model: str) -> str:
        """The entry of `models` whose coordinators are asked for a model."""
        return model if model in self._turns else ""

    def caller(self, metadata: Metadata, held: Held, model: str = "") -> CallerStub:
        """The coordinators of a model with one caller's metadata, and the bytes that its request holds."""
        entry = self.serving(model)
        return CallerStub(self._turns[entry], metadata, held, self._on_failover, entry)

    async def any_serves(self) -> bool:
        """Whether any coordinator serves. Takes about a second at most."""
        return any(await asyncio.gather(*(turns.serves() for turns in self._turns.values())))

    async def keyless(self, timeout_s: float) -> dict[str, bool]:
        """Whether callers need no key, by address, of the coordinators that answer within `timeout_s`."""
        members = self._members()
        told = await asyncio.gather(*(_needs_no_key(member.client, timeout_s) for member in members))
        return {
            member.client.address: answer for member, answer in zip(members, told, strict=True) if answer is not None
        }

    async def reach(self) -> None:
        """Look up names and connect, for a limited time, so that the first chats go where their later turns will."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REACH_S):
                await asyncio.gather(*(refresh() for refresh in self._refreshers))
                self._take()
                if len(self._members()) > 1:
                    await self.any_serves()

    async def keep_finding(self) -> None:
        """Look up names until cancelled, at intervals and when a coordinator does not answer."""
        if refreshers := self._refreshers:
            await keep_finding(_LOOK_UP_S, refreshers, self._take, self._wanted)

    @property
    def _refreshers(self) -> list[Callable[[], Awaitable[object]]]:
        return [found.refresh for found in self._found.values() if found.has_names]

    def _take(self) -> None:
        """Connect to those that are new. Those that are gone get no new calls; running ones go on."""
        for name, turns in self._turns.items():
            known = {(member.entry, member.found): member for member in turns.members}
            found = [(entry, each) for entry in self._entries[name] for each in self._found[entry].endpoints]
            has_new = any(each not in known and each[1].server_name is not None for each in found)
            turns.members = [known.pop(each) if each in known else self._member(*each) for each in found]
            for member in known.values():
                self._leave(member.client)
            if known or has_new:
                _log.info("coordinators_changed", model=name, num_coordinators=len(found))

    def _member(self, entry: str, found: ReplicaAddress) -> Member:
        return Member(self._connect(found), found, entry, word(found.address.encode()))

    def _leave(self, client: Client) -> None:
        """Close a connection when its calls have ended."""
        closing = asyncio.create_task(client.close(_LONGEST_CALL_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def watch(self) -> None:
        """Replace connections over which a coordinator hears nothing, if its model has others; its streams resume."""
        while True:
            await asyncio.sleep(_LOOK_S)
            listened = [member for turns in self._turns.values() if len(turns.members) > 1 for member in turns.members]
            await asyncio.gather(*(self._listen_to(member) for member in listened))

    async def _listen_to(self, member: Member) -> None:
        client, began_s = member.client, time.monotonic()
        is_deaf = await client.is_deaf(_HEARS_S)
        stood_still = time.monotonic() - began_s > _HEARS_S + _STOOD_STILL_S
        if is_deaf and not stood_still and member.client is client:
            member.client, member.avoid_until_s = self._connect(member.found), time.monotonic() + AVOID_S
            _log.warning("coordinator_deaf", address=client.address, seconds=_HEARS_S)
            await client.close()

    def renew(self) -> None:
        """Replace all connections for new calls, as when TLS files have changed; running calls stay where they are."""
        for member in self._members():
            former, member.client = member.client, self._connect(member.found)
            self._leave(former)

    def _members(self) -> list[Member]:
        return [member for turns in self._turns.values() for member in turns.members]

    async def close(self) -> None:
        """Close all connections; running calls are cancelled."""
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for member in self._members():
            await member.client.close()


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
    """Whether the gateway can serve: it does not drain, and a coordinator serves, or requests are held."""

    def __init__(self, coordinators: Coordinators, hold: Hold) -> None:
        self._coordinators = coordinators
        self.hold = hold
        self.is_draining = False
        """New requests are refused."""

    async def is_ready(self) -> bool:
        """Whether a request can be served now, or held."""
        if self.is_draining:
            return False
        return self.hold.holds or await self._coordinators.any_serves()

    def drain(self) -> None:
        """Refuse new requests, and those that are held."""
        self.is_draining = self.hold.is_draining = True
