"""A replica's load: its last report, and this coordinator's changes since."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from specdec.coordinator.links.replica_link import ReplicaLink

_TOKENS_OF_A_SESSION = 2048
"""Waiting prompt tokens that weigh as much as one decoding session."""
_REFUSED_S = 1.0
"""Seconds that a replica counts as full after it said so, unless it reports otherwise."""
_FULL_CACHE = 0.9
"""Share of the KV cache in use above which a replica is strained."""
_SPARE_SHARE = 0.5
"""Share of a replica's sessions in use above which it takes no hedges."""
AnyLink = ReplicaLink[Any, Any, Any]
Link = TypeVar("Link", bound=AnyLink)


def num_sessions(link: AnyLink) -> int:
    """Sessions of all coordinators there; only our own if the replica reports none."""
    own = len(link.sessions)
    if link.load is None or not link.load.HasField("num_sessions"):
        return own
    return max(own, link.load.num_sessions + own - link.num_own_at_load)


def weight(link: AnyLink) -> float:
    """Load in sessions; waiting prompts count by their length."""
    waiting = 0 if link.load is None else link.load.num_waiting_tokens
    return num_sessions(link) + waiting / _TOKENS_OF_A_SESSION


def has_room(link: AnyLink) -> bool:
    """Whether it would take one more session, by its last report."""
    if link.refused_s is not None and time.monotonic() - link.refused_s < _REFUSED_S:
        return False
    if link.load is None or not link.load.HasField("max_sessions"):
        return True
    return num_sessions(link) < link.load.max_sessions


def is_idle(link: AnyLink) -> bool:
    """Whether a session would be stepped at once: no queue in the last report, and no session opened since."""
    load = link.load
    if load is None or load.num_waiting or len(link.sessions) > link.num_own_at_load:
        return False
    return not is_strained(link)


def is_strained(link: AnyLink) -> bool:
    """Whether it has no room, or soon none: it should drop hedges."""
    load = link.load
    is_full = load is not None and load.kv_blocks_used > _FULL_CACHE * load.kv_blocks_total
    return is_full or not has_room(link)


def has_spare(link: AnyLink) -> bool:
    """Whether it has spare capacity: no queue, and half of its sessions free."""
    load = link.load
    if is_strained(link) or (load is not None and load.num_waiting > 0):
        return False
    if load is None or not load.HasField("max_sessions"):
        return True
    return num_sessions(link) < _SPARE_SHARE * load.max_sessions


def with_room(links: Sequence[Link]) -> Sequence[Link]:
    """The links with room; all links if none has."""
    return [link for link in links if has_room(link)] or links
