"""The settings of a gateway, read as those of the other services are (`specdec.config.sources`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from specdec.gateway.chat.parsing import check_names
from specdec.gateway.chat.reasoning import REASONING_PARSERS
from specdec.gateway.chat.template_parsers import AUTO
from specdec.gateway.chat.tool_calls.families import TOOL_PARSERS
from specdec.service.exposure import ExposureSettings
from specdec.telemetry.tracing_settings import TracingSettings
from specdec.wire.settings import WireSettings, check_address, check_client_tls, with_tls_of_folder


def _split_commas(value: Any) -> Any:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


Addresses = Annotated[
    tuple[Annotated[str, BeforeValidator(check_address)], ...], NoDecode, BeforeValidator(_split_commas)
]


def _checked_origin(origin: str) -> str:
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{origin!r} is no origin: write scheme://host or scheme://host:port, or *")
    return origin


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_checked_origin)], ...], NoDecode, BeforeValidator(_split_commas)
]


def _one_of(names: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return name

    return AfterValidator(check)


ReasoningParserName = Annotated[str, _one_of((AUTO, *REASONING_PARSERS))]
ToolParserName = Annotated[str, _one_of((AUTO, *TOOL_PARSERS))]


def _checked_model(entry: str) -> str:
    name, address, percent = _parts(entry)
    if not address or not name or name != name.strip():
        raise ValueError(f"{entry!r} is not NAME=HOST:PORT, such as Qwen/Qwen3-8B=dns:///coordinators:50051")
    check_address(address)
    if percent is not None and not (percent.isascii() and percent.isdigit() and int(percent) <= 100):
        raise ValueError(
            f"{entry!r}: what follows @ is a whole number of percent, 0 to 100, such as {name}={address}@10"
        )
    return entry


def _parts(entry: str) -> tuple[str, str, str | None]:
    """Name, address and percent of an entry of `models`."""
    name, _, rest = entry.partition("=")
    address, separator, percent = rest.partition("@")
    return name, address, percent if separator else None


ModelAddresses = Annotated[
    tuple[Annotated[str, AfterValidator(_checked_model)], ...], NoDecode, BeforeValidator(_split_commas)
]


class GatewaySettings(WireSettings, ExposureSettings, TracingSettings):
    """Settings of a gateway."""

    env_prefix: ClassVar[str] = "SPECDEC_GATEWAY_"

    coordinators: Addresses = Field(
        min_length=1,
        description="Coordinators, host:port or dns:///name:port, separated by commas. Several that share a Redis and "
        "a resume_secret take up each other's streams.",
    )
    models: ModelAddresses = Field(
        default=(),
        description="Further models and their coordinators, NAME=HOST:PORT or NAME=dns:///name:port, separated by "
        "commas; several addresses of a model in as many entries. NAME is the model's name at these coordinators. "
        "Requests for other names, or none, go to `coordinators`. An entry that ends with @PERCENT gets this share of "
        "the model's requests, those without share the rest.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes a free one.")
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="One more port with Prometheus /metrics only; 0 takes a free one, null is off.",
    )
    public_metrics: bool | None = Field(
        default=None,
        description="Serve /metrics on the main port, too, to all clients; null: on loopback, with tls_verify_clients "
        "or with allow_unauthenticated.",
    )
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Plaintext HTTP port with /health, /ping and /version only, for probes; null is off.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    log_format: Literal["json", "console"] = Field(default="json", description="One JSON object a line, or text.")
    access_log: bool = Field(default=False, description="Log each request that ended.")
    page: bool = Field(default=True, description="Show the page at `/`.")

    cors_origins: Origins = Field(
        default=(),
        description="Origins whose pages browsers let call the gateway, such as https://app.example.com, separated by "
        "commas; * is all. The gateway's own page needs none.",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="Seconds that running requests may go on after SIGTERM before they are cut off."
    )
    stop_grace_s: float = Field(
        default=2.0, ge=0, description="Seconds that connections may take to close after draining."
    )

    unknown_fields: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="Fields of requests that the gateway does not know: ignore, and name them in the header "
        "specdec-ignored-fields of the answer, or refuse with 400.",
    )
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, description="Largest body of a request, in bytes.")
    body_read_s: float = Field(default=60.0, gt=0, description="Seconds that a client may take to send a body.")
    reader_stall_s: float = Field(
        default=60.0, gt=0, description="Seconds that a client may read nothing of its answer; then it is cut off."
    )
    header_read_s: float = Field(default=20.0, gt=0, description="Seconds that a client may take to send headers.")
    keep_alive_s: float | None = Field(
        default=10.0,
        gt=0,
        description="Seconds of silence before a stream sends a comment, so that proxies keep it; null: never.",
    )
    max_concurrent_requests: int = Field(
        default=4096,
        ge=1,
        description="Most requests at once; further ones are refused with 429. A key has a quarter and an address half "
        "of the places, at least 8.",
    )
    hold_s: float = Field(
        default=0.0,
        ge=0,
        le=86400,
        description="Seconds from its arrival for which a request waits if no coordinator or target of its model "
        "serves, as for a model that is scaled to zero; then, and for requests beyond max_held_requests, 503 with "
        "retry-after. The gateway is ready without a model. 0: no request waits.",
    )
    max_held_requests: int = Field(
        default=256, ge=1, description="Most requests that wait at once for a model to serve (hold_s)."
    )
    max_held_body_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Most bytes of bodies and answers that are held at once; a single request is always taken, and a "
        "client has a quarter, an address half. null: a seventh of the process's memory limit, at most 1 GiB.",
    )
    max_prompts: int = Field(default=256, ge=1, description="Most prompts of a completion request.")
    max_concurrent_prompts: int = Field(
        default=16, ge=1, description="Most prompts of one request that run at once; the others wait."
    )
    reasoning_parser: ReasoningParserName = Field(
        default=AUTO,
        description=f"Form of the model's reasoning in chats: {', '.join(REASONING_PARSERS)}; "
        "auto: as its chat template writes it.",
    )
    tool_parser: ToolParserName = Field(
        default=AUTO,
        description=f"Form of the model's tool calls in chats: {', '.join(TOOL_PARSERS)}; none: no tools; "
        "auto: as its chat template writes them.",
    )

    coordinator_tls: bool = Field(
        default=False,
        description="Call coordinators over TLS; on with coordinator_tls_dir. Alone it trusts the authorities that "
        "gRPC trusts.",
    )
    coordinator_tls_dir: Path | None = Field(
        default=None,
        description="Folder with ca.crt, the authorities of coordinators' certificates, and optionally tls.crt and "
        "tls.key, the client certificate (mTLS).",
    )
    coordinator_tls_ca_file: Path | None = Field(default=None, description="Replaced by coordinator_tls_dir.")
    coordinator_tls_cert_file: Path | None = Field(default=None, description="Replaced by coordinator_tls_dir.")
    coordinator_tls_key_file: Path | None = Field(default=None, description="Replaced by coordinator_tls_dir.")
    trace_sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, of those whose caller did not decide (needs otlp_endpoint).",
    )

    @property
    def serves_metrics(self) -> bool:
        """Whether the main port serves /metrics."""
        return self.trusts_network if self.public_metrics is None else self.public_metrics

    @property
    def coordinators_of(self) -> dict[str, tuple[str, ...]]:
        """Addresses of coordinators by the name of their model; those of `coordinators` under an empty name."""
        found = {"": self.coordinators}
        for entry in self.models:
            name, address, _ = _parts(entry)
            found[name] = (*found.get(name, ()), address)
        return found

    @property
    def shares(self) -> dict[str, dict[str, int]]:
        """Percent of the requests by address, of the models that have such."""
        found: dict[str, dict[str, int]] = {}
        for name, address, percent in map(_parts, self.models):
            if percent is not None:
                found.setdefault(name, {})[address] = int(percent)
        return found

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        for name, shares in self.shares.items():
            total, is_all = sum(shares.values()), len(shares) == len(set(self.coordinators_of[name]))
            if total > 100 or (is_all and total != 100):
                raise ValueError(
                    f"models: the shares of {name} are {total} % in all; make it 100, or leave one without @"
                )
        return self

    @model_validator(mode="after")
    def _check_parsers(self) -> Self:
        if AUTO not in (self.reasoning_parser, self.tool_parser):
            check_names(self.reasoning_parser, self.tool_parser)
        return self

    @model_validator(mode="before")
    @classmethod
    def _folder_switches_tls_on(cls, values: Any) -> Any:
        return with_tls_of_folder(values, "coordinator_tls")

    @model_validator(mode="after")
    def _check_coordinator_tls(self) -> Self:
        check_client_tls(self, "coordinator_tls")
        return self
