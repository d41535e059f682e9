"""Names of settings that have been replaced, and are still read, or removed, and are ignored. One release long."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REPLACED: Mapping[str, str] = MappingProxyType(
    {
        "tls_cert_file": "tls_dir",
        "tls_key_file": "tls_dir",
        "tls_client_ca_file": "tls_dir and tls_verify_clients",
        **{
            f"{side}_{file}": f"{side}_dir"
            for side in ("replica_tls", "coordinator_tls", "redis_tls")
            for file in ("ca_file", "cert_file", "key_file")
        },
    }
)
"""Settings that are still read, and the new ones. Neither --help nor docs/settings.md shows them."""

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "connect_timeout_s": "an attempt to connect to a replica may take 5 s",
        "reconnect_backoff_min_s": "the first wait before reconnecting is 0.1 s",
        "draft_reopen_s": "a lost draft session is reopened after 1 s",
        "draft_stall_s": "a draft that answers no commit for 2 s loses the session",
        "ejection_s": "the first ejection of a replica lasts 10 s, each further one twice as long",
        "ejection_max_s": "the longest ejection of a replica lasts 300 s",
        "engine_silence_s": "an engine process without a sign of life for 4 s is started again",
        "session_ttl_s": "a session outlives its coordinator's stream by 60 s",
    }
)
"""Settings that no service has any more, and what holds now. Their values are ignored."""

REMOVED_FROM_REPLICAS = frozenset({"engine_silence_s", "session_ttl_s"})
REMOVED_FROM_COORDINATOR = frozenset(REMOVED) - REMOVED_FROM_REPLICAS


def notices(names: frozenset[str]) -> dict[str, str]:
    """Log lines for an operator who gave these settings, by the setting's name."""
    replaced = {
        name: f"{name} is read in this release only: set {REPLACED[name]} instead" for name in names & REPLACED.keys()
    }
    removed = {name: f"{name} was removed and is ignored: {REMOVED[name]}" for name in names & REMOVED.keys()}
    return dict(sorted({**replaced, **removed}.items()))
