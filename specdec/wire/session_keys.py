"""Sessions by names of fixed size, so that how an engine ended can name all that it was working on."""

from __future__ import annotations

import hashlib
from collections.abc import Set

KEY_BYTES = 8


def session_key(session_id: str) -> bytes:
    """What stands for a session in `EngineEnd.session_keys`.

    Chance gives two of a thousand the same once in 10^13 times.
    """
    return hashlib.blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def split_keys(joined: bytes) -> Set[bytes]:
    """The keys that `EngineEnd.session_keys` has one behind the other."""
    return {joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)}
