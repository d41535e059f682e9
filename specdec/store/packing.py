"""Journalled tokens as bytes: per token its id (32 bits, little endian) and its origin (8 bits)."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

_TOKEN = Struct("<IB")
# Bytes per token.
TOKEN_BYTES = _TOKEN.size


def pack_tokens(token_ids: Sequence[int], origins: Sequence[int]) -> bytes:
    """Return the tokens as bytes, TOKEN_BYTES each. There must be as many origins as token ids."""
    return b"".join(map(_TOKEN.pack, token_ids, origins))


def unpack_tokens(packed: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids and the origins. Bytes after the last whole token are ignored."""
    whole = packed[: len(packed) // TOKEN_BYTES * TOKEN_BYTES]
    tokens = list(_TOKEN.iter_unpack(whole))
    return tuple(token_id for token_id, _ in tokens), tuple(origin for _, origin in tokens)
