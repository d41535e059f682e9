"""The coordinators of one model: who is asked next, and whether any of them serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from specdec.client import Client

AVOID_S = 2.0
"""Seconds for which a coordinator that did not answer is tried last."""
_BELIEVED_S = 0.5
"""Seconds for which an answer is reused: probes are frequent, and each calls every coordinator."""
_MOST_TEMPLATES = 16
"""Different chat templates of a model that are remembered, and logged."""
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Member:
    """A coordinator, or several behind one name."""

    client: Client
    avoid_until_s: float = 0.0
    """Monotonic time."""


@dataclass(slots=True)
class Turns:
    """The coordinators of a model."""

    members: Sequence[Member]
    turn: int = field(default=0)
    templates: dict[str, str] = field(default_factory=dict)
    """The coordinator that first told a chat template, by the template's digest."""
    shares: Mapping[str, int] = field(default_factory=dict)
    """Percent of the requests, by address; members of other addresses share the rest, under an empty address."""
    _owed: dict[str, int] = field(default_factory=dict)
    """Percent of a request, by address, that it lacks to its share."""
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked_s: float = float("-inf")
    _serves: bool = False

    def next_release(self) -> str:
        """The address that is to have the next request, or the empty one; each gets exactly its share."""
        shares = {**self.shares, "": 100 - sum(self.shares.values())}
        for address, percent in shares.items():
            self._owed[address] = self._owed.get(address, 0) + percent
        chosen = max(self._owed, key=self._owed.__getitem__)
        self._owed[chosen] -= 100
        return chosen

    def order(self, release: str = "") -> list[Member]:
        """All members: the next one of a release first; those of others, those without a connection and those that did
        not answer lately last."""
        self.turn = (self.turn + 1) % len(self.members)
        rotated = [*self.members[self.turn :], *self.members[: self.turn]]
        now_s = time.monotonic()

        def rank(member: Member) -> tuple[bool, bool, bool]:
            address = member.client.address
            is_other = (address if address in self.shares else "") != release
            return member.avoid_until_s > now_s, is_other, not member.client.is_connected

        return sorted(rotated, key=rank)

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
