"""Settings of both ends of a connection, and addresses as settings and messages have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from specdec.wire.message_sizes import MIN_MESSAGE_BYTES
from specdec.wire.tls_files import FOLDER_FILES, TlsFile, TlsPaths


def check_address(address: str) -> str:
    """Return an address unchanged. Raises ValueError where it is not host:port."""
    host, separator, port = address.rpartition(":")
    is_url = "://" in host and not host.startswith("dns://")
    if not separator or not host or is_url or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    if host.count(":") > 1 and not host.endswith("]"):
        raise ValueError(f"{address!r}: an IPv6 address is written in brackets, such as [::1]:50052")
    return address


def join_address(host: str, port: int) -> str:
    """host:port; an IPv6 address gets brackets unless it has them."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _split_commas(value: Any) -> Any:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


Address = Annotated[str, BeforeValidator(check_address)]
"""host:port, or dns:///name:port where a setting allows it."""
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(_split_commas)]
"""Addresses, in text separated by commas."""


class WireSettings(BaseModel):
    """Message limits and keepalive, the same at both ends of a connection."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    max_message_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=MIN_MESSAGE_BYTES,
        le=128 * 1024 * 1024,
        description="Largest gRPC message that is accepted, in bytes; peers learn it. At a target or a draft it must "
        "hold a session with all tokens of the context.",
    )
    keepalive_time_s: float = Field(default=2.0, ge=1, description="Seconds of a peer's silence before it is pinged.")
    keepalive_timeout_s: float = Field(
        default=3.0,
        ge=0.1,
        description="Seconds that a peer has to answer a ping; then the connection is closed.",
    )


class PeerSettings(WireSettings):
    """How to call other services, over TLS or not."""

    replica_tls: bool = Field(
        default=False,
        description="Call targets and drafts over TLS; on with replica_tls_dir. Alone it trusts "
        "the authorities that gRPC trusts.",
    )
    replica_tls_dir: Path | None = Field(
        default=None,
        description="Folder with ca.crt, the authorities of replicas' certificates, and optionally tls.crt and "
        "tls.key, the client certificate (mTLS).",
    )
    replica_tls_ca_file: Path | None = Field(default=None, description="Replaced by replica_tls_dir.")
    replica_tls_cert_file: Path | None = Field(default=None, description="Replaced by replica_tls_dir.")
    replica_tls_key_file: Path | None = Field(default=None, description="Replaced by replica_tls_dir.")
    replica_tls_server_name: str | None = Field(
        default=None, description="Name expected in replicas' certificates; null: the host called."
    )

    @model_validator(mode="before")
    @classmethod
    def _folder_switches_tls_on(cls, values: Any) -> Any:
        return with_tls_of_folder(values, "replica_tls")

    @model_validator(mode="after")
    def _check_client_tls(self) -> Self:
        check_client_tls(self, "replica_tls")
        return self


class ServerTlsSettings(BaseModel):
    """The certificate that a service serves, and whether its callers must show theirs."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    tls_dir: Path | None = Field(
        default=None,
        description="Folder with tls.crt and tls.key (PEM), as Kubernetes mounts a secret of type kubernetes.io/tls; "
        "set it to serve TLS.",
    )
    tls_verify_clients: bool = Field(
        default=False, description="Demand client certificates from the authorities in ca.crt of tls_dir (mTLS)."
    )
    tls_cert_file: Path | None = Field(default=None, description="Replaced by tls_dir.")
    tls_key_file: Path | None = Field(default=None, description="Replaced by tls_dir.")
    tls_client_ca_file: Path | None = Field(default=None, description="Replaced by tls_dir and tls_verify_clients.")
    metrics_tls: bool = Field(
        default=False, description="Serve metrics_port over TLS, with the same certificate and check of clients."
    )

    @property
    def serves_tls(self) -> bool:
        """Whether the service's port speaks TLS."""
        return self.tls_dir is not None or self.tls_cert_file is not None

    @property
    def verifies_clients(self) -> bool:
        """Whether callers must show a certificate."""
        return self.tls_verify_clients or self.tls_client_ca_file is not None

    def server_tls_paths(self) -> TlsPaths | None:
        """The files to serve; None without TLS."""
        if self.tls_dir is not None:
            return TlsPaths.in_folder("tls_dir", self.tls_dir, has_pair=True, has_authorities=self.tls_verify_clients)
        if self.tls_cert_file is None:
            return None
        return TlsPaths(
            TlsFile("tls_cert_file", self.tls_cert_file),
            TlsFile.of("tls_key_file", self.tls_key_file),
            TlsFile.of("tls_client_ca_file", self.tls_client_ca_file),
        )

    @model_validator(mode="after")
    def _check_server_tls(self) -> Self:
        _check_one_way(self, "tls_dir", ("tls_cert_file", "tls_key_file", "tls_client_ca_file"))
        if self.tls_verify_clients and self.tls_dir is None:
            raise ValueError("tls_verify_clients needs tls_dir")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")
        if self.metrics_tls and not self.serves_tls:
            raise ValueError("metrics_tls needs tls_dir")
        _check_present(self.server_tls_paths())
        return self


def client_tls_paths(settings: BaseModel, side: str) -> TlsPaths:
    """The files that `<side>_dir`, or the settings that it replaces, name for calls to others."""
    folder: Path | None = getattr(settings, f"{side}_dir")
    if folder is not None:
        has_pair = any((folder / name).exists() for name in FOLDER_FILES[:2])
        return TlsPaths.in_folder(f"{side}_dir", folder, has_pair=has_pair, has_authorities=True)
    files = (f"{side}_cert_file", f"{side}_key_file", f"{side}_ca_file")
    return TlsPaths(*(TlsFile.of(name, getattr(settings, name)) for name in files))


def with_tls_of_folder(values: Any, side: str) -> Any:
    """Settings as given, with the switch `side` on where `<side>_dir` is given and the switch is not."""
    if not isinstance(values, dict) or values.get(f"{side}_dir") is None:
        return values
    return {side: True, **values}


def check_client_tls(settings: BaseModel, side: str, *, has_switch: bool = True) -> None:
    """Raise ValueError, which names the setting, where the files for calls to others cannot be used.

    Args:
        settings: with `<side>_dir`, and the settings that it replaces.
        side: first part of the settings' names.
        has_switch: whether `side` is a setting too, which must be on.
    """
    files = (f"{side}_cert_file", f"{side}_key_file", f"{side}_ca_file")
    _check_one_way(settings, f"{side}_dir", files)
    if has_switch and not getattr(settings, side):
        for name in (f"{side}_dir", *files):
            if getattr(settings, name) is not None:
                raise ValueError(f"{name} needs {side}")
    _check_present(client_tls_paths(settings, side))


def _check_one_way(settings: BaseModel, folder: str, files: tuple[str, str, str]) -> None:
    """Raise ValueError where a folder and a file are both given, or half of a pair."""
    given = [name for name in files if getattr(settings, name) is not None]
    if given and getattr(settings, folder) is not None:
        raise ValueError(f"{folder} and {given[0]}: set one of them; {folder} replaces {given[0]}")
    certificate, key, _ = files
    if (certificate in given) != (key in given):
        raise ValueError(f"{certificate} and {key} must be set together")


def _check_present(paths: TlsPaths | None) -> None:
    for file in paths or ():
        if file.path.is_file():
            continue
        if file.in_folder:
            raise ValueError(f"{file.setting}: the folder {file.path.parent} has no file {file.path.name}")
        raise ValueError(f"{file.setting}: no such file: {file.path}")
