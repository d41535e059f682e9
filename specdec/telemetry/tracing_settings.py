"""Settings of tracing that every service has: the collector, its headers and its authorities."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


class TracingSettings(BaseModel):
    """The collector of spans. Without `otlp_endpoint` no span is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    otlp_endpoint: str | None = Field(
        default=None,
        description="Collector that takes traces by OTLP over gRPC: http://HOST:PORT, or https://HOST:PORT for TLS; "
        "null: no tracing.",
    )
    otlp_headers: SecretStr | None = Field(
        default=None,
        description="Headers of every export, such as a key: NAME=VALUE, separated by commas, values URL-encoded; "
        "null: OTEL_EXPORTER_OTLP_HEADERS.",
    )
    otlp_ca_file: Path | None = Field(
        default=None,
        description="PEM authorities that the collector's certificate must come from; null: "
        "OTEL_EXPORTER_OTLP_CERTIFICATE, or those gRPC trusts.",
    )

    @model_validator(mode="after")
    def _check_tracing(self) -> Self:
        # As a model's validator: errors of a field's own would repeat its value, and headers are secret.
        for name in ("otlp_headers", "otlp_ca_file"):
            if self.otlp_endpoint is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs otlp_endpoint")
        self.otlp_metadata()
        if self.otlp_endpoint is None:
            return self
        url = _endpoint(self.otlp_endpoint)
        _check_protocol()
        if self.otlp_ca_file is not None and url.scheme != "https":
            raise ValueError("otlp_ca_file needs an otlp_endpoint that begins with https://")
        if self.otlp_ca_file is not None and not self.otlp_ca_file.is_file():
            raise ValueError(f"otlp_ca_file: no such file: {self.otlp_ca_file}")
        return self

    def otlp_metadata(self) -> tuple[tuple[str, str], ...]:
        """`otlp_headers` as gRPC metadata. Raises ValueError, which does not repeat them, when they do not parse."""
        if self.otlp_headers is None:
            return ()
        pairs: list[tuple[str, str]] = []
        for item in filter(None, (part.strip() for part in self.otlp_headers.get_secret_value().split(","))):
            name, equals, value = item.partition("=")
            name, value = unquote(name).strip().lower(), unquote(value).strip()
            if not equals or not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValueError(f"otlp_headers: item {len(pairs) + 1} is no NAME=VALUE of printable ASCII")
            pairs.append((name, value))
        return tuple(pairs)


def _check_protocol() -> None:
    """Refuse a protocol that OpenTelemetry's variables ask for and that is not gRPC."""
    for name in _PROTOCOL_VARIABLES:
        if value := os.environ.get(name, "").strip():
            if value != "grpc":
                raise ValueError(
                    f"otlp_endpoint: spans are exported by OTLP over gRPC only, but {name} is {value!r}: name the"
                    " gRPC port of a collector (4317 by default), and set the variable to grpc"
                )
            return


def _endpoint(value: str) -> SplitResult:
    form = "must be http://HOST:PORT or https://HOST:PORT (OTLP over gRPC; http/protobuf is not supported)"
    try:
        url = urlsplit(value)
        has_port = url.port is not None
    except ValueError:
        raise ValueError(f"otlp_endpoint: {form}") from None
    if url.username is not None:
        raise ValueError(f"otlp_endpoint: {form}; credentials belong into otlp_headers")
    if url.scheme not in ("http", "https") or not url.hostname or not has_port or url.path.strip("/") or url.query:
        raise ValueError(f"otlp_endpoint: {form}, not {value!r}")
    return url
