"""How soon a coordinator gives replicas up and tries them again. Constants: tests alone use others."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.coordinator.replicas.outliers import FIRST_EJECTION_S, LONGEST_EJECTION_S


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in seconds."""

    connect_timeout_s: float = 5.0
    """Longest attempt to connect to a replica, for each of its two round trips: gRPC's own attempt takes as long."""
    reconnect_first_s: float = 0.1
    """Wait after the first failure to connect, or to open a session; it doubles up to `reconnect_backoff_max_s`."""
    retry_spread: tuple[float, float] = (0.5, 1.0)
    """Bounds of the random factor of a wait to open a session: a full target's sessions must not return together."""
    draft_reopen_s: float = 1.0
    """Wait before a session that lost its draft gets one again: plain decoding loses little in a second."""
    draft_stall_s: float = 2.0
    """Longest time in which a draft may answer no commit before the session moves to another: 20 slow steps."""
    ejection_s: float = FIRST_EJECTION_S
    ejection_max_s: float = LONGEST_EJECTION_S
