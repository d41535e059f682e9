"""Entries of a file of API keys."""

from __future__ import annotations

import hashlib


def hash_key(key: str) -> str:
    """The form in which a key is stored: hexadecimal SHA-256 of its UTF-8."""
    return hashlib.sha256(key.encode()).hexdigest()
