"""Session keys of fixed size: the report of an engine's end lists the sessions that it was working on."""

from __future__ import annotations

import hashlib
from collections.abc import Set

KEY_BYTES = 8


def session_key(session_id: str) -> bytes:
    """The key of a session in `EngineEnd.session_keys`: among a thousand sessions two share one with chance 10^-13."""
    return hashlib.blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def split_keys(joined: bytes) -> Set[bytes]:
    """The keys in `EngineEnd.session_keys`, which joins them."""
    return {joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)}
