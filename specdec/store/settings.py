"""Settings of the store that services share, and the store made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from specdec.store.guarded import GuardedStore, OperationObserver, StateObserver
from specdec.store.interface import StoreUrlError
from specdec.store.keys import DEFAULT_PREFIX
from specdec.store.memory import MemoryStore
from specdec.store.urls import RedisOptions, connect
from specdec.wire.settings import Address, check_client_tls, client_tls_paths


class StoreSettings(BaseModel):
    """The shared store. Without `redis_url` everything is kept in the process."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    redis_url: SecretStr | None = Field(
        default=None,
        description="Redis of all services: redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, "
        "redis+cluster://HOST:PORT,HOST:PORT, or rediss (TLS) in place of redis; null: none.",
    )
    redis_username: str | None = Field(default=None, min_length=1, description="Redis user; it wins over the URL's.")
    redis_password: SecretStr | None = Field(
        default=None, min_length=1, description="Redis password; it wins over the URL's."
    )
    redis_sentinel_username: str | None = Field(default=None, min_length=1, description="Redis user at the sentinels.")
    redis_sentinel_password: SecretStr | None = Field(
        default=None, min_length=1, description="Redis password at the sentinels."
    )
    redis_tls_dir: Path | None = Field(
        default=None,
        description="Folder with ca.crt, the authorities of Redis' certificate, and optionally tls.crt and tls.key, "
        "the client certificate; null: the system's authorities.",
    )
    redis_tls_ca_file: Path | None = Field(default=None, description="Replaced by redis_tls_dir.")
    redis_tls_cert_file: Path | None = Field(default=None, description="Replaced by redis_tls_dir.")
    redis_tls_key_file: Path | None = Field(default=None, description="Replaced by redis_tls_dir.")
    redis_timeout_s: float = Field(
        default=0.25, gt=0, description="Longest time of a Redis operation, in seconds; a longer one counts as failed."
    )
    redis_key_prefix: str = Field(
        default=DEFAULT_PREFIX, pattern=r"^[A-Za-z0-9._-]{1,64}$", description="First part of all keys."
    )
    advertise_address: Address | None = Field(
        default=None,
        description="host:port at which others reach this process, for the registry; null: the setting host, or where "
        "that is a wildcard the machine's name, and the port.",
    )
    registry_ttl_s: float = Field(
        default=15.0,
        ge=1,
        description="Seconds that a registration lasts without renewal; processes renew it after a third of them.",
    )

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        if self.redis_url is None:
            for name in type(self).model_fields:
                if name in _NEED_URL and getattr(self, name) is not None:
                    raise ValueError(f"{name} needs redis_url")
            return self
        check_client_tls(self, "redis_tls", has_switch=False)
        try:
            connect(self.redis_url.get_secret_value(), self.redis_options())
        except StoreUrlError as error:
            raise ValueError(str(error)) from None
        return self

    def redis_options(self) -> RedisOptions:
        """Credentials, TLS and limits of connections to Redis."""
        return RedisOptions(
            username=self.redis_username,
            password=self.redis_password,
            sentinel_username=self.redis_sentinel_username,
            sentinel_password=self.redis_sentinel_password,
            tls=client_tls_paths(self, "redis_tls"),
            timeout_s=self.redis_timeout_s,
            key_prefix=self.redis_key_prefix,
        )


_NEED_URL = frozenset(
    {
        "redis_username",
        "redis_password",
        "redis_sentinel_username",
        "redis_sentinel_password",
        "redis_tls_dir",
        "redis_tls_ca_file",
        "redis_tls_cert_file",
        "redis_tls_key_file",
    }
)


def open_store(
    settings: StoreSettings, observe: OperationObserver | None = None, on_change: StateObserver | None = None
) -> GuardedStore:
    """Return the store of a service: on Redis, or in this process when no `redis_url` is set.

    Redis need not answer. The arguments are those of GuardedStore.
    """
    if settings.redis_url is None:
        return GuardedStore(MemoryStore(), observe, on_change)
    store = connect(settings.redis_url.get_secret_value(), settings.redis_options())
    guarded = GuardedStore(store, observe, on_change)
    guarded.tls_files = store.tls_files
    return guarded
