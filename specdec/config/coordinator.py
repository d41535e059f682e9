"""Settings of a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    model_validator,
)
from pydantic_settings import NoDecode

from specdec.config.replica import RejectionMethodName, VerifyModeName
from specdec.service.settings import ServiceSettings
from specdec.wire.sampling_limits import MAX_LOGPROBS
from specdec.wire.settings import Address, ClientSettings, WireSettings

# Room for "-63".
_MAX_SHARED_OWNER_CHARS = 61


def _split_commas(value: Any) -> Any:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(_split_commas)]


class CoordinatorSettings(ServiceSettings, ClientSettings):
    """Settings of a coordinator."""

    env_prefix: ClassVar[str] = "SPECDEC_COORDINATOR_"

    targets: Addresses = Field(
        default=(),
        description="Target replicas, host:port or dns:///name:port, separated by commas; "
        "with redis_url those in its registry too, so there may be none.",
    )
    drafts: Addresses = Field(default=(), description="Draft replicas, written alike; none: plain decoding.")
    discovery_s: float = Field(
        default=5.0, gt=0, description="How often names in dns:/// entries, and the registry in Redis, are looked up."
    )
    prefix_ttl_s: float = Field(
        default=600.0,
        ge=1,
        description="How long other coordinators know through Redis that a target caches a prefix.",
    )
    tokenizer: Path | None = Field(
        default=None, description="Directory with tokenizer.json; null: fetched from a target."
    )
    owner_id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Name of this process; null: host and a random id. With num_processes, each adds its number.",
    )
    num_processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that share the port, each with one core's worth of work; above 1 needs redis_url.",
    )

    client_keepalive_time_s: float = Field(
        default=10.0, ge=1, description="As keepalive_time_s, for connections of clients, whose networks are slower."
    )
    client_keepalive_timeout_s: float = Field(
        default=20.0, ge=0.1, description="As keepalive_timeout_s, for connections of clients."
    )

    max_running: int = Field(
        default=64, ge=1, description="Most choices that run at once, in each process; a request of n takes n places."
    )
    max_waiting: int = Field(
        default=256,
        ge=0,
        description="Most requests that wait for places, in each process; when full, the tenant with most loses one.",
    )
    max_concurrent_calls: int | None = Field(
        default=None,
        ge=1,
        description="Most calls at once, in each process, health too; above, calls are refused unread. null: no limit.",
    )
    max_held_prompt_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1,
        description="Most bytes of requests that wait or run, in each process; a single one always may.",
    )
    max_held_prompt_bytes_per_tenant: int = Field(
        default=64 * 1024 * 1024, ge=1, description="The same, of one tenant."
    )
    reader_stall_s: float = Field(
        default=60.0, gt=0, description="A client that takes nothing for so long while output waits is cut off."
    )
    shed_speculation_after_s: float | None = Field(
        default=2.0,
        gt=0,
        description="Requests open without speculation once others have waited for places for so long; null: never.",
    )
    queue_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait for a place.")
    credit_window_tokens: int = Field(
        default=256, ge=1, description="How far a target may run ahead of what was written to the client."
    )

    max_choices: int = Field(default=16, ge=1, description="Most choices of a request.")
    max_tokens_limit: int | None = Field(
        default=None, ge=1, description="Most output tokens of a choice; null: what the context leaves."
    )
    excess_max_tokens: Literal["cut", "refuse"] = Field(
        default="cut",
        description="What becomes of a request for more output tokens than the context, max_tokens_limit and the "
        "caller's key leave: it is cut to these, or refused.",
    )
    max_stop_strings: int = Field(default=16, ge=0, description="Most stop strings of a request.")
    max_stop_string_bytes: int = Field(default=256, ge=1, description="Longest stop string, in UTF-8.")
    max_logprobs: int = Field(default=20, ge=0, le=MAX_LOGPROBS, description="Most alternatives per log-probability.")
    max_logit_bias: int = Field(default=1024, ge=0, description="Most tokens with a bias.")
    max_prompt_bytes: int = Field(default=4 * 1024 * 1024, ge=1, description="Longest prompt, in UTF-8.")
    max_prompt_tokens: int | None = Field(default=None, ge=1, description="Longest prompt, in tokens; null: no limit.")
    trust_request_chat_template: bool = Field(
        default=False,
        description="Render conversations with the chat template that a request brings. Templates are programs: "
        "whoever may send one can keep this process busy and use up its memory.",
    )

    api_keys_file: Path | None = Field(
        default=None,
        description="File of hashed API keys (YAML or JSON), read again when it changes; null: no authentication.",
    )
    quota_tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Prompt and output tokens per second of a tenant; null: off.",
    )
    quota_burst_tokens: float | None = Field(
        default=None,
        ge=1,
        allow_inf_nan=False,
        description="Tokens that a tenant may save up; null: ten seconds of quota_tokens_per_s.",
    )
    max_concurrent_requests_per_tenant: int | None = Field(
        default=None, ge=1, description="Most requests of a tenant that run or wait at once; null: off."
    )

    verify_mode: VerifyModeName = Field(
        default="coupled", description="How proposals are verified when a request does not say."
    )
    rejection_sample_method: RejectionMethodName = Field(
        default="standard",
        description="How rejection mode decides on a chain when a request does not say: token by token, or as a block.",
    )
    max_draft_tokens: int = Field(
        default=8,
        ge=0,
        le=64,
        description="Most draft tokens per step that a request may ask for; without a wish replicas' own limits count.",
    )
    request_read_s: float = Field(
        default=60.0, gt=0, description="How long a client may take to send its request; then DEADLINE_EXCEEDED."
    )
    speculate: bool = Field(default=True, description="Speculate when a request does not say.")
    connect_timeout_s: float = Field(default=5.0, gt=0, description="Longest attempt to connect to a replica.")
    reconnect_backoff_min_s: float = Field(default=0.1, gt=0, description="First wait before reconnecting.")
    reconnect_backoff_max_s: float = Field(default=5.0, gt=0, description="Longest wait before reconnecting.")
    target_timeout_s: float = Field(
        default=30.0, gt=0, description="How long a session may be without a target before it fails."
    )
    draft_reopen_s: float = Field(default=1.0, gt=0, description="Wait before a lost draft session is reopened.")
    session_stall_s: float = Field(
        default=4.0,
        gt=0,
        description="How long a target may do nothing for a session that it could go on with, before another target "
        "gets it; three times as long for targets that tell no progress.",
    )
    draft_stall_s: float = Field(
        default=2.0,
        gt=0,
        description="How long a draft may be told of commits without a proposal, before another draft gets it.",
    )
    draft_hedge_share: float = Field(
        default=0.125,
        ge=0,
        le=1,
        description="Most sessions that have a second draft for a while because theirs is slow, of those that run; "
        "one always may. 0: sessions stay with slow drafts.",
    )
    allow_mixed_numerics: bool = Field(
        default=False,
        description="Targets may differ in numerics (data type, device, kernels); else those that differ are "
        "incompatible. A choice that more than one computed says so at its end.",
    )
    ejection_failures: int = Field(
        default=5, ge=1, description="Consecutive failures after which a replica gets no sessions for a while."
    )
    ejection_s: float = Field(default=10.0, gt=0, description="How long that is at first; doubled each further time.")
    ejection_max_s: float = Field(default=300.0, gt=0, description="The longest it is.")
    resume_secret: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Key of resume tokens, one for all coordinators; null: random, of this process only.",
    )

    journal_lease_s: float = Field(
        default=10.0,
        ge=1,
        description="A running request stays this coordinator's for so long when nothing is heard of it; its id is "
        "taken for others till then. Only a resume takes it over sooner.",
    )
    journal_keep_s: float = Field(
        default=300.0, ge=0, description="How long the journal of a request is kept after its end."
    )
    trace_sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, of those whose caller did not decide (needs otlp_endpoint).",
    )
    trace_content: bool = Field(
        default=False, description="Put prompts, stop strings and outputs into traces; they may be personal data."
    )

    @property
    def most_concurrent_calls(self) -> int | None:
        """Clients are many, and each call holds what it sent."""
        return self.max_concurrent_calls

    def wire_to_callers(self) -> WireSettings:
        """Callers are clients, which may sleep or be on slow lines: replicas are held to shorter times."""
        return WireSettings(
            max_message_bytes=self.max_message_bytes,
            keepalive_time_s=self.client_keepalive_time_s,
            keepalive_timeout_s=self.client_keepalive_timeout_s,
        )

    @model_validator(mode="after")
    def _check_backoff(self) -> Self:
        if self.reconnect_backoff_min_s > self.reconnect_backoff_max_s:
            raise ValueError("reconnect_backoff_min_s must not be above reconnect_backoff_max_s")
        if self.ejection_s > self.ejection_max_s:
            raise ValueError("ejection_s must not be above ejection_max_s")
        return self

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if not self.targets and self.redis_url is None:
            raise ValueError("targets must name at least one target, unless redis_url is set")
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.num_processes == 1:
            return self
        if self.redis_url is None:
            raise ValueError(
                "num_processes above 1 needs redis_url: without it a request that runs in one process is unknown in "
                "the others"
            )
        if self.owner_id is not None and len(self.owner_id) > _MAX_SHARED_OWNER_CHARS:
            raise ValueError(
                f"owner_id must be at most {_MAX_SHARED_OWNER_CHARS} characters when num_processes is above 1"
            )
        return self

    @model_validator(mode="after")
    def _check_quota(self) -> Self:
        if self.quota_burst_tokens is not None and self.quota_tokens_per_s is None:
            raise ValueError("quota_burst_tokens needs quota_tokens_per_s")
        return self
