"""Bounds on arguments, the same for every store."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.store.interface import JournalWrite, LimitExceeded, NewRequest, StoreLimits

MAX_DIGEST_BYTES = 64
MAX_NAME_CHARACTERS = 512
MAX_TOKEN_ID = (1 << 32) - 1
MAX_ORIGIN = 255
MAX_SEED = (1 << 64) - 1
MAX_DURATION_S = 366 * 24 * 3600.0


def check_name(what: str, name: str) -> None:
    """Raise LimitExceeded for a name (an address, an owner) that is empty, too long or not printable."""
    _require(0 < len(name) <= MAX_NAME_CHARACTERS, f"{what} must have 1 to {MAX_NAME_CHARACTERS} characters")
    # Not half a surrogate pair, which no encoding holds, and not the separator of keys.
    _require(name.isprintable(), f"{what} must be printable")


def check_duration(what: str, duration_s: float) -> None:
    """Raise LimitExceeded for a duration below a millisecond, which is the stores' resolution, or above a year."""
    _require(0.001 <= duration_s <= MAX_DURATION_S, f"{what} must be 0.001 to {MAX_DURATION_S:.0f} s")


def check_keep(keep_s: float) -> None:
    """Raise LimitExceeded for a time to keep a record that is negative, or above a year."""
    _require(0 <= keep_s <= MAX_DURATION_S, f"keep_s must be 0 to {MAX_DURATION_S:.0f} s")


def check_digests(digests: Sequence[bytes], limits: StoreLimits) -> None:
    """Raise LimitExceeded for too many digests, or one of a wrong length."""
    _require(len(digests) <= limits.max_digests, f"more than {limits.max_digests} digests in one call")
    _require(
        all(0 < len(digest) <= MAX_DIGEST_BYTES for digest in digests),
        f"a digest must have 1 to {MAX_DIGEST_BYTES} bytes",
    )


def check_request(request: NewRequest, limits: StoreLimits) -> None:
    """Raise LimitExceeded for a request that is too large to journal."""
    check_name("owner_id", request.owner_id)
    check_duration("lease_s", request.lease_s)
    _require(0 <= request.seed <= MAX_SEED, "seed must have 64 bits")
    _require(1 <= request.num_choices <= limits.max_choices, f"num_choices must be 1 to {limits.max_choices}")
    _require(len(request.params) <= limits.max_params_bytes, f"params exceed {limits.max_params_bytes} bytes")


def check_writes(writes: Sequence[JournalWrite], limits: StoreLimits) -> None:
    """Raise LimitExceeded for tokens that cannot be journalled."""
    for write in writes:
        _require(0 <= write.choice < limits.max_choices, f"choice must be below {limits.max_choices}")
        _require(write.start >= 0, "start must not be negative")
        _require(
            write.start + len(write.token_ids) <= limits.max_tokens, f"more than {limits.max_tokens} tokens in a choice"
        )
        _require(len(write.origins) == len(write.token_ids), "origins must have one entry per token id")
        _require(all(0 <= token <= MAX_TOKEN_ID for token in write.token_ids), "a token id must have 32 bits")
        _require(all(0 <= origin <= MAX_ORIGIN for origin in write.origins), "an origin must have 8 bits")


def check_bucket(amount: float, rate_per_s: float, burst: float, force: bool) -> None:
    """Raise LimitExceeded for a bucket that never fills, an infinite number, or a negative amount without force."""
    _require(math.isfinite(amount), "amount must be finite")
    _require(amount >= 0 or force, "amount must not be negative without force")
    for name, value in (("rate_per_s", rate_per_s), ("burst", burst)):
        _require(value > 0 and math.isfinite(value), f"{name} must be finite and above 0")


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise LimitExceeded(message)
