"""TLS to Redis, with files that are read again when they are renewed."""

from __future__ import annotations

import ssl
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import RedisSSLContext, SSLConnection

from specdec.store.interface import StoreUrlError
from specdec.wire.tls_files import TlsFiles, TlsFilesBroken, TlsPaths, client_context


def redis_tls_files(paths: TlsPaths) -> TlsFiles:
    """The files for connections to Redis. Raises StoreUrlError, which names the setting."""
    try:
        return TlsFiles(client_context, paths)
    except TlsFilesBroken as error:
        raise StoreUrlError(str(error)) from error


def follow_files(client: Redis | RedisCluster, files: TlsFiles) -> None:
    """Make a client, before it first connects, use the files and no other authorities at each connection.

    redis-py's own connections keep the certificate of their first attempt for as long as their pool lives, and trust
    the system's authorities beside those of a file.
    """
    if isinstance(client, RedisCluster):
        of_node = client.connection_kwargs["connection_class"] = _following(SSLConnection, files)
        for node in client.startup_nodes:
            node.connection_class = of_node
    else:
        pool = client.connection_pool
        pool.connection_class = _following(pool.connection_class, files)


def _following(base: type[Any], files: TlsFiles) -> type[Any]:
    class FollowingConnection(base):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.ssl_context = _FollowedContext(files)

    return FollowingConnection


class _FollowedContext(RedisSSLContext):
    def __init__(self, files: TlsFiles) -> None:
        super().__init__(cert_reqs="required", check_hostname=True)
        self._files = files

    def get(self) -> ssl.SSLContext:
        return self._files.current().ssl_context
