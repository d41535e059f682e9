"""Journalled tokens as bytes: per token its id (32 bits, little endian) and its origin (8 bits)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TOKEN = np.dtype([("token_id", "<u4"), ("origin", "u1")])
# Bytes per token.
TOKEN_BYTES = _TOKEN.itemsize


def pack_tokens(token_ids: Sequence[int], origins: Sequence[int]) -> bytes:
    """Return the tokens as bytes, TOKEN_BYTES each."""
    packed = np.empty(len(token_ids), dtype=_TOKEN)
    packed["token_id"] = token_ids
    packed["origin"] = origins
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids and the origins. Bytes after the last whole token are ignored."""
    tokens = np.frombuffer(packed, dtype=_TOKEN, count=len(packed) // TOKEN_BYTES)
    return tuple(tokens["token_id"].tolist()), tuple(tokens["origin"].tolist())
