"""How loaded a target is: what it reported, and what has changed here since."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from coordinator.links.replica_link import ReplicaLink

_TOKENS_OF_A_SESSION = 2048
"""So many prompt tokens that wait weigh as much as one session that decodes."""
_REFUSED_S = 1.0
"""How long a target that said it is full is taken to be, unless it reports something else."""
_FULL_CACHE = 0.9
"""Share of the KV cache in use from which on a target is not idle, whatever waits there."""
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
    if load is None or load.num_waiting or len(link.sessions) > link.num_own_at_load or not has_room(link):
        return False
    return load.kv_blocks_used <= _FULL_CACHE * load.kv_blocks_total


def with_room(links: Sequence[Link]) -> Sequence[Link]:
    """Those that have room; all of them when none has."""
    return [link for link in links if has_room(link)] or links
