"""Settings of both ends of a connection, and addresses as settings and messages have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from specdec.wire.message_sizes import MIN_MESSAGE_BYTES


def check_address(address: str) -> str:
    """Return an address as it is. Raises ValueError when it is none."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    if host.count(":") > 1 and not host.endswith("]"):
        raise ValueError(f"{address!r}: an IPv6 address is written in brackets, such as [::1]:50052")
    return address


def join_address(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets, whether it has them already or not."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


Address = Annotated[str, BeforeValidator(check_address)]
"""host:port, or dns:///name:port where a setting says so."""


class WireSettings(BaseModel):
    """What both ends of a connection set alike."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    max_message_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=MIN_MESSAGE_BYTES,
        le=128 * 1024 * 1024,
        description="Largest gRPC message that is taken; peers are told. At a target or a draft it must hold a session "
        "with all tokens of the context.",
    )
    keepalive_time_s: float = Field(default=2.0, ge=1, description="Ping a silent peer after this long.")
    keepalive_timeout_s: float = Field(
        default=3.0,
        ge=0.1,
        description="A peer that owes the answer to a ping this long is gone: its silence shows after the sum of both.",
    )


class ClientSettings(WireSettings):
    """How to call other services, over TLS or not."""

    replica_tls: bool = Field(default=False, description="Call targets and drafts over TLS.")
    replica_tls_ca_file: Path | None = Field(
        default=None,
        description="PEM authorities that replicas' certificates must come from; null: those gRPC trusts.",
    )
    replica_tls_cert_file: Path | None = Field(default=None, description="PEM client certificate chain (mTLS).")
    replica_tls_key_file: Path | None = Field(default=None, description="PEM private key of the client certificate.")
    replica_tls_server_name: str | None = Field(
        default=None, description="Name expected in replicas' certificates; null: the host called."
    )

    @model_validator(mode="after")
    def _check_client_tls(self) -> Self:
        if (self.replica_tls_cert_file is None) != (self.replica_tls_key_file is None):
            raise ValueError("replica_tls_cert_file and replica_tls_key_file must be set together")
        if not self.replica_tls and (self.replica_tls_ca_file or self.replica_tls_cert_file):
            raise ValueError("replica_tls_ca_file and replica_tls_cert_file need replica_tls")
        check_files(self, ("replica_tls_ca_file", "replica_tls_cert_file", "replica_tls_key_file"))
        return self


def check_files(settings: BaseModel, names: tuple[str, ...]) -> None:
    """Raise ValueError where one of these settings names a file that does not exist."""
    for name in names:
        path: Path | None = getattr(settings, name)
        if path is not None and not path.is_file():
            raise ValueError(f"{name}: no such file: {path}")
