"""The links of one role, as replicas come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.wire.discovery import ReplicaAddress

_GOODBYE_S = 1.0
"""Seconds to wait for a replica that does not read its stream to the end."""
_log = structlog.get_logger(__name__)
_Link = TypeVar("_Link", bound=ReplicaLink)


@dataclass(slots=True)
class _Member(Generic[_Link]):
    link: _Link
    endpoint: ReplicaAddress
    """Its last discovered endpoint."""
    task: asyncio.Task[None]

    def is_missed(self) -> bool:
        """Whether the replica, which discovery no longer lists, is retired.

        A replica that was only in the registry stays while its stream is up: it, or Redis, may have lost the record,
        and it still serves. A replica that leaves on purpose announces it on its stream.
        """
        return not (self.endpoint.is_registered and self.link.is_up)


class Roster(Generic[_Link]):
    """Runs one link per endpoint.

    An endpoint that vanished or is not wanted gets no new sessions. Its link is removed once its sessions have ended,
    and, if it vanished, its stream.
    """

    def __init__(
        self,
        make_link: Callable[[ReplicaAddress], _Link],
        on_links: Callable[[list[_Link]], None],
        on_removed: Callable[[_Link], None],
    ) -> None:
        self._make_link = make_link
        self._on_links = on_links
        self._on_removed = on_removed
        self._members: dict[str, _Member[_Link]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, endpoints: Sequence[ReplicaAddress], wanted: Collection[str] | None = None) -> None:
        """Start links to new endpoints, retire those of others, and remove idle retired ones.

        `wanted`: addresses of the endpoints to be used; None: all.
        """
        listed = {endpoint.address: endpoint for endpoint in endpoints}
        used = set(listed if wanted is None else wanted)
        started = [
            (endpoint, self._make_link(endpoint))
            for address, endpoint in listed.items()
            if address in used and address not in self._members
        ]
        removed = []
        for address, member in list(self._members.items()):
            link, endpoint = member.link, listed.get(address)
            if endpoint is not None:
                member.endpoint = endpoint
            is_spare, was_retired = endpoint is not None and address not in used, link.is_retired
            link.set_retired(is_spare or (endpoint is None and member.is_missed()))
            # A request may just have picked a spare one: its stream ends with the next update.
            may_end = was_retired if is_spare else not link.is_up
            if link.is_retired and may_end and not link.sessions:
                removed.append(self._members.pop(address))
        # The owner must know the links before the first one runs.
        self._on_links([*(member.link for member in self._members.values()), *(link for _, link in started)])
        for endpoint, link in started:
            task = asyncio.create_task(link.run(), name=f"link {link.address}")
            self._members[link.address] = _Member(link, endpoint, task)
            _log.info("replica_added", role=link.role, address=link.address)
        for member in removed:
            _log.info("replica_removed", role=member.link.role, address=member.link.address)
            self._on_removed(member.link)
            closing = asyncio.create_task(_end(member))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all links; replicas that read get their queued entries, and see the streams end."""
        members, self._members = list(self._members.values()), {}
        for member in members:
            member.link.end()
        if listening := [member.task for member in members if member.link.is_up]:
            await asyncio.wait(listening, timeout=_GOODBYE_S)
        for member in members:
            member.task.cancel()
        for member in members:
            await _end(member)
        await asyncio.gather(*self._closing)


async def _end(member: _Member[_Link]) -> None:
    member.link.end()
    if member.link.is_up:
        await asyncio.wait([member.task], timeout=_GOODBYE_S)
    member.task.cancel()
    await asyncio.wait([member.task])
    await member.link.channel.close()
