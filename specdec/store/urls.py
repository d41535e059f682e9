"""A store on Redis, made from its URL."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import SecretStr
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from specdec.store.interface import StoreLimits, StoreUrlError
from specdec.store.keys import DEFAULT_PREFIX, StoreKeys
from specdec.store.redis_store import RedisStore
from specdec.store.tls import follow_files, redis_tls_files
from specdec.wire.tls_files import TlsFiles, TlsPaths

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
REDIS_PORT = 6379
SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Credentials, TLS and limits of connections to Redis. Credentials here win over those in the URL."""

    username: str | None = None
    password: SecretStr | None = None
    # Credentials at the sentinels, which differ from those at the servers.
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    # For rediss only. Without a file of authorities the system's are trusted.
    tls: TlsPaths = field(default_factory=TlsPaths)
    # Seconds of the longest operation; a longer one counts as failed.
    timeout_s: float = 0.25
    key_prefix: str = DEFAULT_PREFIX


@dataclass(frozen=True, slots=True)
class _Target:
    scheme: str
    hosts: list[tuple[str, int]]
    service: str | None
    database: int

    @property
    def has_tls(self) -> bool:
        return self.scheme.startswith("rediss")


def connect(url: str, options: RedisOptions | None = None, limits: StoreLimits | None = None) -> RedisStore:
    """Return a store on the Redis at `url`. It connects when it is first used, so Redis may be down.

    Args:
        url: `redis://HOST[:PORT][/DATABASE]`, `redis+sentinel://HOST[:PORT],.../SERVICE[/DATABASE]` or
            `redis+cluster://HOST[:PORT],...`; with `rediss` in place of `redis` under TLS, sentinels included. It may
            hold credentials (`USER:PASSWORD@`, percent-encoded).
        options: everything else.
        limits: bounds on stored data.

    Raises:
        StoreUrlError: the URL or an option is wrong. The message names the setting and holds no password.
    """
    options = options or RedisOptions()
    parts = _split(url)
    target = _target(parts)
    if not options.timeout_s > 0:
        raise StoreUrlError("redis_timeout_s: must be above 0")
    tls = _tls(target, options)
    arguments: dict[str, Any] = {
        "username": options.username or _decoded(parts.username),
        "password": options.password.get_secret_value() if options.password else _decoded(parts.password),
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        # A pooled connection may be dead after a restart: the next one is tried once, without a pause.
        "retry": Retry(NoBackoff(), 1),
        "ssl": tls is not None,
    }
    client: Redis | RedisCluster
    sentinels: list[Redis] = []
    close_others = None
    if target.scheme.endswith("+cluster"):
        nodes = [ClusterNode(host, port) for host, port in target.hosts]
        client = RedisCluster(
            startup_nodes=nodes,
            # Known nodes may all be gone; a name in the URL leads to the present ones.
            dynamic_startup_nodes=False,
            # A moved slot is noted; closing all connections for it would break other operations.
            reinitialize_steps=0,
            **arguments,
        )
    elif target.scheme.endswith("+sentinel"):
        secret = options.sentinel_password
        # Sentinels are asked in turn; hanging ones must leave time for the last one, and for the master.
        share_s = options.timeout_s / (len(target.hosts) + 1)
        sentinel = Sentinel(
            target.hosts,
            sentinel_kwargs={
                **arguments,
                "username": options.sentinel_username,
                "password": secret.get_secret_value() if secret else None,
                "socket_timeout": share_s,
                "socket_connect_timeout": share_s,
                "retry": Retry(NoBackoff(), 0),
            },
            db=target.database,
            **arguments,
        )
        client = sentinel.master_for(target.service or "")
        sentinels = sentinel.sentinels

        async def close_sentinels() -> None:
            await asyncio.gather(*(one.aclose() for one in sentinels))

        close_others = close_sentinels
    else:
        [(host, port)] = target.hosts
        client = Redis(host=host, port=port, db=target.database, **arguments)
    if tls is not None:
        for one in (client, *sentinels):
            follow_files(one, tls)
    return RedisStore(client, StoreKeys(options.key_prefix), options.timeout_s, limits, close_others, tls)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        # The error's message may quote the URL.
        raise StoreUrlError("redis_url: not a URL") from None
    if parts.scheme not in SCHEMES:
        # Not quoted: in a URL without a scheme the password may be parsed as the scheme.
        raise StoreUrlError(f"redis_url: must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    if parts.query or parts.fragment:
        raise StoreUrlError("redis_url: takes no ?query and no #fragment (percent-encode them in a password)")
    return parts


def _target(parts: SplitResult) -> _Target:
    default_port = SENTINEL_PORT if parts.scheme.endswith("+sentinel") else REDIS_PORT
    hosts = [_host(text, default_port) for text in parts.netloc.rpartition("@")[2].split(",")]
    path = [unquote(part) for part in parts.path.strip("/").split("/") if part]
    service = None
    if parts.scheme.endswith("+sentinel"):
        if not path:
            raise StoreUrlError("redis_url: a sentinel URL ends with the name of the service, for example /mymaster")
        service = path.pop(0)
    elif parts.scheme.endswith("+cluster"):
        if path:
            raise StoreUrlError("redis_url: a cluster has no databases, so its URL has no path")
    elif len(hosts) != 1:
        raise StoreUrlError("redis_url: several hosts need redis+sentinel:// or redis+cluster://")
    if len(path) > 1 or not all(part.isascii() and part.isdigit() for part in path):
        raise StoreUrlError("redis_url: the database must be a number")
    return _Target(parts.scheme, hosts, service, int(path[0]) if path else 0)


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise StoreUrlError("redis_url: each host must be HOST or HOST:PORT, with a port from 1 to 65535")
    return host, port or default_port


def _tls(target: _Target, options: RedisOptions) -> TlsFiles | None:
    if target.has_tls:
        return redis_tls_files(options.tls)
    for file in options.tls:
        raise StoreUrlError(f"{file.setting}: needs a redis_url that begins with rediss")
    return None


def _decoded(text: str | None) -> str | None:
    return None if text is None else (unquote(text) or None)
