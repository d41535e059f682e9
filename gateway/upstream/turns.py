"""The coordinators of one model: who is asked for a chat, and whether any of them serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from specdec.client import Client
from specdec.wire.discovery import ReplicaAddress
from specdec.wire.rendezvous import by_preference

AVOID_S = 2.0
"""Seconds for which a coordinator that did not answer is tried last."""
_BELIEVED_S = 0.5
"""Seconds for which an answer is reused: probes are frequent, and each calls every coordinator."""
_MOST_TEMPLATES = 16
"""Different chat templates of a model that are remembered, and logged."""
_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """A coordinator."""

    client: Client
    found: ReplicaAddress
    entry: str
    """The address, or name, among the settings by which it was found."""
    word: int
    """Of its address, by which chats prefer it."""
    num_running: int = 0
    """Requests that it serves for this gateway."""
    avoid_until_s: float = 0.0
    """Monotonic time."""
    tell_at_s: float = 0.0
    """Monotonic time from which the log may tell its next failure."""
    num_untold: int = 0
    """Calls that it failed since the log's last line of it."""


@dataclass(slots=True)
class Turns:
    """The coordinators of a model."""

    members: list[Member]
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the names of coordinators are to be looked up."""
    turn: int = field(default=0)
    templates: dict[str, str] = field(default_factory=dict)
    """The coordinator that first told a chat template, by the template's digest."""
    shares: Mapping[str, int] = field(default_factory=dict)
    """Percent of the requests, by entry; members of other entries share the rest, under an empty one."""
    _owed: dict[str, int] = field(default_factory=dict)
    """Percent of a request, by entry, that it lacks to its share."""
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked_s: float = float("-inf")
    _serves: bool = False

    def next_release(self) -> str:
        """The entry that is to have the next request, or the empty one; each gets exactly its share."""
        shares = {**self.shares, "": 100 - sum(self.shares.values())}
        for address, percent in shares.items():
            self._owed[address] = self._owed.get(address, 0) + percent
        chosen = max(self._owed, key=self._owed.__getitem__)
        self._owed[chosen] -= 100
        return chosen

    def order(self, release: str = "", key: int | None = None) -> list[Member]:
        """All members: those of a release first; those of others, those without a connection and those that did not
        answer lately last. Among equals in the order in which the key prefers them, or in turn without one.
        """
        now_s = time.monotonic()
        self.turn += 1
        own = self._ranked([member for member in self.members if self._release_of(member) == release], key)
        others = self._ranked([member for member in self.members if self._release_of(member) != release], key)

        def rank(member: Member) -> tuple[bool, bool, bool]:
            is_other = self._release_of(member) != release
            return member.avoid_until_s > now_s, is_other, not member.client.is_connected

        return sorted([*own, *others], key=rank)

    def _release_of(self, member: Member) -> str:
        return member.entry if member.entry in self.shares else ""

    def _ranked(self, members: list[Member], key: int | None) -> list[Member]:
        if key is not None:
            return by_preference(members, key)
        turn = self.turn % max(1, len(members))
        return [*members[turn:], *members[:turn]]

    def avoid(self, member: Member) -> None:
        """A member did not answer: it is tried last for a while, and its name is looked up."""
        member.avoid_until_s = time.monotonic() + AVOID_S
        self.wanted.set()

    def learn(self, address: str, template: str) -> None:
        """A coordinator has told the digest of its chat template; each that differs from the first is logged once."""
        if template and template not in self.templates and len(self.templates) < _MOST_TEMPLATES:
            self.templates[template] = address
            if len(self.templates) > 1:
                remedy = "give all targets the same chat template, and restart the coordinators"
                risk = "what a conversation becomes depends on the coordinator"
                _log.error("chat_templates_differ", coordinators=self.templates, risk=risk, remedy=remedy)

    async def serves(self) -> bool:
        """Whether any of them reports SERVING; asked at most twice a second. Takes about a second at most."""
        async with self._asking:
            if time.monotonic() - self._asked_s >= _BELIEVED_S:
                answers = await asyncio.gather(*(member.client.is_serving() for member in self.members))
                self._serves, self._asked_s = any(answers), time.monotonic()
        return self._serves
