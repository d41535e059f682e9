"""Journalled tokens as bytes: per token its id (32 bits, little endian) and its origin (8 bits)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_TOKEN = struct.Struct("<IB")
# Bytes per token.
TOKEN_BYTES = _TOKEN.size


def pack_tokens(token_ids: Sequence[int], origins: Sequence[int]) -> bytes:
    """Return the tokens as bytes, TOKEN_BYTES each."""
    return b"".join(map(_TOKEN.pack, token_ids, origins))


def unpack_tokens(packed: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids and the origins. Bytes after the last whole token are ignored."""
    whole = packed[: len(packed) // TOKEN_BYTES * TOKEN_BYTES]
    token_ids, origins = tuple(zip(*_TOKEN.iter_unpack(whole), strict=True)) or ((), ())
    return token_ids, origins
