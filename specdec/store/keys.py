"""Names of the Redis store's keys; docs/redis.md lists them."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from specdec.store.interface import RequestKey

# Part of every key: another layout gets another version, so that versions can run side by side during an upgrade.
LAYOUT_VERSION = "v1"
DEFAULT_PREFIX = "specdec"
MAX_ESCAPED_CHARACTERS = 128


class StoreKeys:
    """Names keys below a prefix. What one script touches has one hash tag, so that it is on one node of a cluster."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self._prefix = f"{prefix}:{LAYOUT_VERSION}"

    def replicas(self) -> list[str]:
        """Return the keys of the registry: expiries and records."""
        return [f"{self._prefix}:{{registry}}:{part}" for part in ("expiries", "records")]

    def prefix_holders(self, digest: bytes) -> list[str]:
        """Return the key of one digest's holders."""
        return [f"{self._prefix}:prefix:{{{digest.hex()}}}"]

    def request(self, key: RequestKey) -> list[str]:
        """Return a request's keys: its head, from which those of its tokens derive, and the tenant's live ones."""
        tenant = self._tenant(key.tenant)
        return [f"{tenant}:request:{escape(key.request_id)}", f"{tenant}:live"]

    def quota(self, bucket: str) -> list[str]:
        """Return the key of a token bucket."""
        return [f"{self._tenant(bucket)}:quota"]

    def _tenant(self, tenant: str) -> str:
        # The letter keeps the tag of an empty name from being empty, which Redis would not take for a tag.
        return f"{self._prefix}:{{t.{escape(tenant)}}}"


def escape(name: str) -> str:
    """Return a name of bounded length without separators and braces; different names stay different."""
    escaped = quote(name, safe="", errors="surrogatepass")
    if len(escaped) <= MAX_ESCAPED_CHARACTERS:
        return escaped
    # quote() never yields a percent sign before a lower-case letter.
    return "%sha256." + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
