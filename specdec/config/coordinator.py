"""Settings of a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import (
    Field,
    SecretStr,
    model_validator,
)

from specdec.config.replica import RejectionMethodName, VerifyModeName
from specdec.config.retired import REMOVED_FROM_COORDINATOR
from specdec.service.settings import ServiceSettings
from specdec.wire.sampling_limits import MAX_LOGPROBS
from specdec.wire.settings import Addresses, PeerSettings, WireSettings

ProposalPath = Literal["auto", "direct", "relayed"]
_MAX_SHARED_OWNER_CHARS = 61
"""Characters of an owner_id, with room for the number of a process, such as "-63"."""


class CoordinatorSettings(ServiceSettings, PeerSettings):
    """Settings of a coordinator."""

    env_prefix: ClassVar[str] = "SPECDEC_COORDINATOR_"
    removed: ClassVar[frozenset[str]] = REMOVED_FROM_COORDINATOR

    targets: Addresses = Field(
        default=(),
        description="Target replicas, host:port or dns:///name:port, separated by commas; "
        "with redis_url those in its registry too, so there may be none.",
    )
    drafts: Addresses = Field(default=(), description="Draft replicas, written alike; none: plain decoding.")
    proposal_path: ProposalPath = Field(
        default="auto",
        description="How tokens reach drafts and proposals reach targets: auto directly, where a draft's link_targets "
        "names the target and both authenticate each other, else relayed by the coordinator; direct never relays "
        "proposals; relayed allows no links.",
    )
    discovery_s: float = Field(
        default=5.0, gt=0, description="Seconds between two look-ups of dns:/// names and of the registry in Redis."
    )
    subset_size: int | None = Field(
        default=64,
        ge=2,
        description="Targets, and drafts, that a coordinator is attached to, on average over all coordinators in the "
        "registry, where there are more; without redis_url and with null: all.",
    )
    prefix_ttl_s: float = Field(
        default=600.0,
        ge=1,
        description="Seconds that Redis remembers which target caches a prefix, for other coordinators.",
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
        default=64,
        ge=1,
        description="Most choices that run at once, in each process; a request for n choices takes n places.",
    )
    max_waiting: int = Field(
        default=256,
        ge=0,
        description="Most requests that wait for a place, in each process; in a full queue the tenant with the most "
        "requests loses one.",
    )
    max_concurrent_calls: int | None = Field(
        default=None,
        ge=1,
        description="Most calls at once, in each process, health included; more are refused unread. null: no limit.",
    )
    max_held_prompt_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Most bytes of the requests that wait or run, in each process; a single request is always taken. "
        "null: a twentieth of the process's memory limit, at most 256 MiB.",
    )
    max_held_prompt_bytes_per_tenant: int | None = Field(
        default=None,
        ge=1,
        description="Most bytes of one tenant's requests that wait or run, in each process; null: a quarter of all.",
    )
    reader_stall_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a client may read nothing while output waits; then its stream is cut off.",
    )
    shed_speculation_after_s: float | None = Field(
        default=2.0,
        gt=0,
        description="Seconds that a request may wait for a place before new requests open without speculation; null: "
        "never.",
    )
    queue_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait of a request for a place, in seconds.")
    credit_window_tokens: int = Field(
        default=256, ge=1, description="Most tokens by which a target may run ahead of the client's stream."
    )

    max_choices: int = Field(default=16, ge=1, description="Most choices of a request.")
    max_tokens_limit: int | None = Field(
        default=None, ge=1, description="Most output tokens of a choice; null: the rest of the context."
    )
    excess_max_tokens: Literal["cut", "refuse"] = Field(
        default="cut",
        description="A request for more output tokens than the context, max_tokens_limit and the caller's key allow is "
        "cut to these, or refused.",
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
        "their senders can keep this process busy and use up its memory.",
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
        description="Most draft tokens per step that a request may ask for; a request that asks for none gets the "
        "replicas' own limits.",
    )
    request_read_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a client may take to send its request; then the call ends with DEADLINE_EXCEEDED.",
    )
    speculate: bool = Field(default=True, description="Speculate when a request does not say.")
    access_log: bool = Field(
        default=False,
        description="Log each request that ended, with its times and lengths: `specdec plan --trace` reads this log.",
    )
    reconnect_backoff_max_s: float = Field(
        default=5.0, gt=0, description="Longest wait before a replica is connected to again, in seconds."
    )
    picker_metrics: bool = Field(
        default=False,
        description="Export load under vLLM's names, too, by which an endpoint picker of the Gateway API chooses.",
    )
    target_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that a session may be without a target before it fails."
    )
    session_stall_s: float = Field(
        default=4.0,
        gt=0,
        description="Seconds without progress after which a session moves to another target; three times as long for "
        "targets that report no progress.",
    )
    draft_hedge_share: float = Field(
        default=0.125,
        ge=0,
        le=1,
        description="Largest share of the running sessions that may have a second draft because theirs is slow; one "
        "session always may. 0: sessions stay with slow drafts.",
    )
    allow_mixed_numerics: bool = Field(
        default=False,
        description="Accept targets that differ in numerics (data type, device, kernels); otherwise they are "
        "incompatible. A choice that several numerics computed says so at its end.",
    )
    ejection_failures: int = Field(
        default=5,
        ge=1,
        description="Consecutive failures after which a replica gets no sessions: for 10 s, then twice as long each "
        "further time, up to 300 s.",
    )
    resume_secret: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Key of resume tokens, one for all coordinators; null: random, of this process only.",
    )

    journal_lease_s: float = Field(
        default=10.0,
        ge=1,
        description="Seconds that a silent coordinator keeps a running request; until then no other request may use "
        "its id. Only a resume takes it over sooner.",
    )
    journal_keep_s: float = Field(
        default=300.0, ge=0, description="Seconds that the journal of a request is kept after its end."
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
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return self.api_keys_file is not None

    @property
    def most_concurrent_calls(self) -> int | None:
        """Most calls at once: clients are many, and each call holds its request in memory."""
        return self.max_concurrent_calls

    def wire_to_callers(self) -> WireSettings:
        """Message limits and keepalive of clients, which may sleep or be on slow lines: the times are longer."""
        return WireSettings(
            max_message_bytes=self.max_message_bytes,
            keepalive_time_s=self.client_keepalive_time_s,
            keepalive_timeout_s=self.client_keepalive_timeout_s,
        )

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
