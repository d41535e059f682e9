"""A replica's load: its last report, and this coordinator's changes since; and which replicas may get a session.

`now_s` is the time of the clock on which `refused_s` was read.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Protocol, TypeVar

from specdec.coordinator.links.link_events import LinkState
from specdec.v1 import common_pb2 as pb

_TOKENS_OF_A_SESSION = 2048
"""Waiting prompt tokens that weigh as much as one decoding session."""
_REFUSED_S = 1.0
"""Seconds that a replica counts as full after it said so, unless it reports otherwise."""
_FULL_CACHE = 0.9
"""Share of the KV cache in use above which a replica is strained."""
_SPARE_SHARE = 0.5
"""Share of a replica's sessions in use above which it takes no hedges."""


class LoadedLink(Protocol):
    """What choosing a replica reads of its link (`ReplicaLink`)."""

    @property
    def sessions(self) -> Sized:
        """Our sessions there."""

    @property
    def load(self) -> pb.LoadReport | None:
        """Its last report."""

    @property
    def num_own_at_load(self) -> int:
        """Our sessions there when that came."""

    @property
    def refused_s(self) -> float | None:
        """When it last reported to be full; None: not since its last load report."""

    @property
    def state(self) -> LinkState:
        """State of its stream, and its standing."""

    @property
    def is_ready(self) -> bool:
        """New sessions may be opened without restriction."""


Link = TypeVar("Link", bound=LoadedLink)


def num_sessions(link: LoadedLink) -> int:
    """Sessions of all coordinators there; only our own if the replica reports none."""
    own, load = len(link.sessions), link.load
    if load is None or not load.HasField("num_sessions"):
        return own
    return max(own, load.num_sessions + own - link.num_own_at_load)


def weight(link: LoadedLink) -> float:
    """Load in sessions; waiting prompts count by their length."""
    load = link.load
    waiting = 0 if load is None else load.num_waiting_tokens
    return num_sessions(link) + waiting / _TOKENS_OF_A_SESSION


def has_room(link: LoadedLink, now_s: float) -> bool:
    """Whether it would take one more session, by its last report."""
    refused_s, load = link.refused_s, link.load
    if refused_s is not None and now_s - refused_s < _REFUSED_S:
        return False
    if load is None or not load.HasField("max_sessions"):
        return True
    return num_sessions(link) < load.max_sessions


def is_idle(link: LoadedLink, now_s: float) -> bool:
    """Whether a session would be stepped at once: no queue in the last report, and no session opened since."""
    load = link.load
    if load is None or load.num_waiting or len(link.sessions) > link.num_own_at_load:
        return False
    return not is_strained(link, now_s)


def is_strained(link: LoadedLink, now_s: float) -> bool:
    """Whether it has no room, or soon none: it should drop hedges."""
    load = link.load
    is_full = load is not None and load.kv_blocks_used > _FULL_CACHE * load.kv_blocks_total
    return is_full or not has_room(link, now_s)


def has_spare(link: LoadedLink, now_s: float) -> bool:
    """Whether it has spare capacity: no queue, and half of its sessions free."""
    load = link.load
    if is_strained(link, now_s) or (load is not None and load.num_waiting > 0):
        return False
    if load is None or not load.HasField("max_sessions"):
        return True
    return num_sessions(link) < _SPARE_SHARE * load.max_sessions


def with_room(links: Sequence[Link], now_s: float) -> Sequence[Link]:
    """The links with room; all links if none has."""
    return [link for link in links if has_room(link, now_s)] or links


def usable(links: Sequence[Link]) -> list[Link]:
    """Links that may get a session: first a link on probation without sessions, then ready ones.

    Without ready links, all on probation are used, and without these the ejected ones.
    """
    by_state: dict[LinkState, list[Link]] = {}
    for link in links:
        by_state.setdefault(link.state, []).append(link)
    on_probation = by_state.get(LinkState.PROBATION, [])
    return (
        [link for link in on_probation if not len(link.sessions)]
        or by_state.get(LinkState.READY, [])
        or on_probation
        or by_state.get(LinkState.EJECTED, [])
    )
