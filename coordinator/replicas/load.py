"""How loaded a target is: what it reported, and what has changed here since."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from specdec.coordinator.links.replica_link import ReplicaLink

_TOKENS_OF_A_SESSION = 2048
"""So many prompt tokens that wait weigh as much as one session that decodes."""
_REFUSED_S = 1.0
"""How long a target that said it is full is taken to be, unless it reports something else."""
_FULL_CACHE = 0.9
"""Share of the KV cache in use from which on a target is not idle, whatever waits there."""
_SPARE_SHARE = 0.5
"""Of a replica's sessions: from there on it has better to do than what another one does as well."""
AnyLink = ReplicaLink[Any, Any, Any]
Link = TypeVar("Link", bound=AnyLink)


def num_sessions(link: AnyLink) -> int:
    """Sessions of all coordinators, as far as is known: a target that does not report them has our own."""
    own = len(link.sessions)
    if link.load is None or not link.load.HasField("num_sessions"):
        return own
    return max(own, link.load.num_sessions + own - link.num_own_at_load)


def weight(link: AnyLink) -> float:
    """How loaded it is, in sessions; prompts that wait count by their length."""
    waiting = 0 if link.load is None else link.load.num_waiting_tokens
    return num_sessions(link) + waiting / _TOKENS_OF_A_SESSION


def has_room(link: AnyLink) -> bool:
    """Whether it would take one more session, as far as is known."""
    if link.refused_s is not None and time.monotonic() - link.refused_s < _REFUSED_S:
        return False
    if link.load is None or not link.load.HasField("max_sessions"):
        return True
    return num_sessions(link) < link.load.max_sessions


def is_idle(link: AnyLink) -> bool:
    """Whether a session would get its first step there at once: it reported so, and nothing was opened since."""
    load = link.load
    if load is None or load.num_waiting or len(link.sessions) > link.num_own_at_load:
        return False
    return not is_strained(link)


def is_strained(link: AnyLink) -> bool:
    """Whether it has no room, or soon none: what it could do without is in the way there."""
    load = link.load
    is_full = load is not None and load.kv_blocks_used > _FULL_CACHE * load.kv_blocks_total
    return is_full or not has_room(link)


def has_spare(link: AnyLink) -> bool:
    """Whether it could do more than it must: nothing waits there, and half of its sessions are free."""
    load = link.load
    if is_strained(link) or (load is not None and load.num_waiting > 0):
        return False
    if load is None or not load.HasField("max_sessions"):
        return True
    return num_sessions(link) < _SPARE_SHARE * load.max_sessions


def with_room(links: Sequence[Link]) -> Sequence[Link]:
    """Those that have room; all of them when none has."""
    return [link for link in links if has_room(link)] or links
