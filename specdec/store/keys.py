"""Names of the Redis store's keys; docs/redis.md lists them."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from specdec.store.interface import RequestKey

LAYOUT_VERSION = "v1"
"""Part of every key: a new layout gets a new version, so that two can run side by side during an upgrade."""
DEFAULT_PREFIX = "specdec"
MAX_ESCAPED_CHARACTERS = 128


class StoreKeys:
    """Names keys below a prefix. The keys of one script have one hash tag, hence one node of a cluster."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self._prefix = f"{prefix}:{LAYOUT_VERSION}"

    def replicas(self) -> list[str]:
        """Return the keys of the registry: expiries and records."""
        return [f"{self._prefix}:{{registry}}:{part}" for part in ("expiries", "records")]

    def registry(self) -> list[str]:
        """Return the keys of `replicas`, and of the registry's version."""
        return [*self.replicas(), f"{self._prefix}:{{registry}}:version"]

    def prefix_holders(self, digest: bytes) -> list[str]:
        """Return the key of one digest's holders."""
        return [f"{self._prefix}:prefix:{{{digest.hex()}}}"]

    def request(self, key: RequestKey) -> list[str]:
        """Return the keys of a request's head, which its tokens' keys extend, and of the tenant's live requests."""
        tenant = self._tenant(key.tenant)
        return [f"{tenant}:request:{escape(key.request_id)}", f"{tenant}:live"]

    def quota(self, bucket: str) -> list[str]:
        """Return the key of a token bucket."""
        return [f"{self._tenant(bucket)}:quota"]

    def _tenant(self, tenant: str) -> str:
        # With the letter the tag of an empty name is not empty; Redis ignores an empty tag.
        return f"{self._prefix}:{{t.{escape(tenant)}}}"


def escape(name: str) -> str:
    """Return a name of bounded length without separators and braces; different names stay different."""
    escaped = quote(name, safe="", errors="surrogatepass")
    if len(escaped) <= MAX_ESCAPED_CHARACTERS:
        return escaped
    # quote() never yields a percent sign before a lower-case letter.
    return "%sha256." + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
