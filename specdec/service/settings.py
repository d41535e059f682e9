"""Settings that every service has: address, logs, TLS, keepalive, message limits, shutdown."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from specdec.service.exposure import ExposureSettings
from specdec.service.process import parse_cores
from specdec.store.settings import StoreSettings
from specdec.telemetry.tracing_settings import TracingSettings
from specdec.wire.settings import WireSettings


def _check_cores(value: str) -> str:
    if value not in ("auto", "off"):
        parse_cores(value)
    return value


def _split_commas(value: Any) -> Any:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


Cores = Annotated[str, BeforeValidator(_check_cores)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]


class ServiceSettings(WireSettings, ExposureSettings, StoreSettings, TracingSettings):
    """Settings of every gRPC service. Invalid values raise pydantic.ValidationError, which names the setting."""

    port: int = Field(default=50051, ge=0, le=65535, description="Port of the gRPC server; 0 takes a free one.")
    metrics_port: int | None = Field(
        default=9090,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; 0 takes a free one, null is off.",
    )
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Plaintext port with gRPC health only, for probes that cannot speak TLS; null is off.",
    )
    reflection: bool | None = Field(
        default=None,
        description="Serve gRPC reflection; null: on loopback, with tls_verify_clients or with allow_unauthenticated.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    log_format: Literal["json", "console"] = Field(default="json", description="One JSON object a line, or text.")

    drain_s: float = Field(
        default=30.0, ge=0, description="Seconds that running work may go on after SIGTERM before it is cut off."
    )
    stop_grace_s: float = Field(default=2.0, ge=0, description="Seconds that open calls may still take after draining.")

    tls_allowed_client_names: Names = Field(
        default=(),
        description="DNS or common names of client certificates that may call, separated by commas; "
        "none: any that tls_verify_clients accepts.",
    )

    @model_validator(mode="after")
    def _check_client_names(self) -> Self:
        if self.tls_allowed_client_names and not self.verifies_clients:
            raise ValueError("tls_allowed_client_names needs tls_verify_clients")
        return self

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Names of client certificates that may make the calls of drafts, and no others."""
        return ()

    @property
    def serves_reflection(self) -> bool:
        """Whether callers may ask which methods there are."""
        return self.trusts_network if self.reflection is None else self.reflection

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return False

    @property
    def most_concurrent_calls(self) -> int | None:
        """Most calls that the server takes at once; None: no limit."""
        return None

    def wire_to_callers(self) -> WireSettings:
        """Message limits and keepalive of the server's connections."""
        return self


class ReplicaServiceSettings(ServiceSettings):
    """Settings of a service with an engine process."""

    engine_cores: Cores = Field(
        default="auto",
        description="CPU cores of the engine process, such as 1-3,6; auto leaves the lowest eighth, at least "
        "one, to the servicer; off pins nothing.",
    )
    load_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="Seconds in which the model must be loaded and warmed up; then the service exits.",
    )
    engine_stall_s: float | None = Field(
        default=None,
        ge=1,
        description="Longest turn of an engine's loop, mostly a step, before the engine is killed and started again; "
        "null: 6 s, 20 times the longest turn before it, or 4 times a full step's time at warm-up, whichever is most.",
    )
    engine_restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Most restarts in ten minutes of an engine that was ready once; then the service exits with 1. 0: "
        "it exits when the engine first ends.",
    )
    stream_buffer_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=64 * 1024,
        description="Most bytes of responses kept for a coordinator that does not read. At half of them its sessions "
        "wait; when it reads nothing for 30 s its stream is aborted.",
    )

    @property
    def most_engine_restarts(self) -> int:
        """Most restarts in ten minutes of an engine that was ready once."""
        return self.engine_restarts
