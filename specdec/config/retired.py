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

REMOVED: Mapping[str, str] = MappingProxyType({})
"""Settings that no service has any more, and what holds now. Their values are ignored."""


def notices(names: frozenset[str]) -> dict[str, str]:
    """What to tell an operator who gave these settings, by name."""
    replaced = {
        name: f"{name} is read in this release only: set {REPLACED[name]} instead" for name in names & REPLACED.keys()
    }
    removed = {name: f"{name} was removed and is ignored: {REMOVED[name]}" for name in names & REMOVED.keys()}
    return dict(sorted({**replaced, **removed}.items()))
