"""The settings of the three services, and how they are read: flags, SPECDEC_* environment, a file, defaults.

    python -m target_service --model models/target --num-threads 2
    SPECDEC_TARGET_MODEL=models/target python -m target_service
    python -m target_service --config target.yaml

A flag wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import NoDecode

from specdec.addresses import Address
from specdec.drafters.options import DrafterOptions, ServiceOptions, check_drafters, read_drafters
from specdec.endpoints.options import ApiTargetOptions
from specdec.engine.settings import EngineSettings
from specdec.rpc.settings import ClientSettings, ReplicaServiceSettings, ServiceSettings, WireSettings
from specdec.sampling_limits import MAX_LOGPROBS
from specdec.settings_sources import load_settings, settings_or_exit

__all__ = ["CoordinatorSettings", "DraftSettings", "TargetSettings", "load_settings", "settings_or_exit"]


def _split_commas(value: Any) -> Any:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(_split_commas)]
VerifyModeName = Literal["coupled", "rejection"]
RejectionMethodName = Literal["standard", "block"]
HeterogeneousVocab = Literal["auto", "intersection", "text"]
_SAME_FOR_OWN_DRAFT = (
    "device", "native", "self_test", "max_sessions", "max_batch_seqs",
    "max_draft_tokens", "max_proposal_nodes", "verify_mode",
)  # fmt: skip
# Room for "-63".
_MAX_SHARED_OWNER_CHARS = 61


class ReplicaSettings(ReplicaServiceSettings, EngineSettings):
    """What targets and drafts have in common: an engine behind a gRPC server."""

    model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name clients use; null: the last part of the model's path or id.",
    )
    session_ttl_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a session outlives its coordinator's stream before it is freed.",
    )
    max_sessions: int = Field(default=256, ge=1, description="Most sessions at once.")
    verify_mode: VerifyModeName = Field(
        default="coupled", description="How proposals are verified when a session does not say."
    )

    @property
    def served_name(self) -> str:
        """The name clients use."""
        return self.model_name or Path(self.model).name


class OwnDraft(BaseModel):
    """A draft model in the target's process: its folder or hub id, and any setting of a draft."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1)


def _read_own_draft(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("{"):
        return {"model": value}
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error


def _read_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error


class TargetSettings(ReplicaSettings):
    """Settings of a target replica."""

    env_prefix: ClassVar[str] = "SPECDEC_TARGET_"

    port: int = Field(default=50052, ge=0, le=65535, description="Port of the gRPC server; 0 takes a free one.")
    metrics_port: int | None = Field(
        default=9092,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; 0 takes a free one, null is off.",
    )
    max_proposal_nodes: int = Field(default=64, ge=1, le=64, description="Most nodes of one proposal or tree.")
    max_draft_tokens: int = Field(
        default=8,
        ge=0,
        le=64,
        description="Most draft tokens verified per session and step; 0 never speculates.",
    )
    hold_off_ms: float | None = Field(
        default=None,
        ge=0,
        description="Longest wait of a step for a draft; null: what the cost model finds worth it.",
    )
    adaptive_speculation: bool = Field(
        default=True,
        description="Suspend the drafts of sessions for which plain decoding is measured to be faster.",
    )
    own_draft: Annotated[OwnDraft | None, NoDecode, BeforeValidator(_read_own_draft)] = Field(
        default=None,
        description="Draft model that this process runs itself, in turns with the target, on the same cores or device: "
        'its folder or hub id, or JSON with any setting of a draft, {"model": "M", "weight_quantization": "int8"}. '
        "Draft services are then not needed; what they propose is not used.",
    )

    drafters: Annotated[
        tuple[DrafterOptions, ...], NoDecode, BeforeValidator(read_drafters), AfterValidator(check_drafters)
    ] = Field(
        default=(),
        description="What proposes beside the draft: names with commas between them, or JSON with options, "
        '[{"method": "eagle3", "model": "DIR"}, {"method": "ngram", "prompt_lookup_max": 4}, "suffix"]. '
        "Without weights there are ngram, suffix, prediction, token_recycling, lookahead, and layer_skip, the target "
        "without some of its layers; heads over the target's hidden "
        "states are medusa, eagle, eagle3, peagle, dflash and dspark.",
    )

    api: Annotated[ApiTargetOptions | None, NoDecode, BeforeValidator(_read_json)] = Field(
        default=None,
        description="An OpenAI-compatible endpoint that verifies in place of a model here, as JSON, "
        '{"base_url": "https://host/v1", "model": "M"}; of `model` the tokenizer and config are read, and no weights.',
    )

    @property
    def own_draft_settings(self) -> DraftSettings | None:
        """Those of the draft in this process."""
        if self.own_draft is None:
            return None
        same = {name: getattr(self, name) for name in _SAME_FOR_OWN_DRAFT}
        return DraftSettings.model_validate({**same, **self.own_draft.model_dump()})

    @model_validator(mode="after")
    def _check_api(self) -> Self:
        if self.api is not None and (self.own_draft is not None or self.drafters):
            raise ValueError("api: with neither own_draft nor drafters, which run beside a model")
        return self

    @model_validator(mode="after")
    def _check_own_draft(self) -> Self:
        if self.own_draft is not None:
            if self.tensor_parallel_size > 1:
                raise ValueError("own_draft: not with tensor_parallel_size above 1; use a draft service")
            try:
                _ = self.own_draft_settings
            except ValidationError as error:
                raise ValueError(f"own_draft: {error}") from error
        return self


class DraftSettings(ReplicaSettings, ClientSettings):
    """Settings of a draft replica: with a model, or with drafters that need none."""

    env_prefix: ClassVar[str] = "SPECDEC_DRAFT_"

    port: int = Field(default=50053, ge=0, le=65535, description="Port of the gRPC server; 0 takes a free one.")
    metrics_port: int | None = Field(
        default=9093,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; 0 takes a free one, null is off.",
    )
    model: str = Field(
        default="", description="Directory of a transformers model, or a hub id; empty: drafters propose, and no model."
    )
    drafters: Annotated[
        tuple[ServiceOptions, ...], NoDecode, BeforeValidator(read_drafters), AfterValidator(check_drafters)
    ] = Field(
        default=(),
        description="What proposes in place of a model, without torch: ngram, suffix and openai_api, with options as "
        'in a target\'s drafters, [{"method": "openai_api", "base_url": "https://host/v1", "model": "M"}].',
    )
    target: Address | None = Field(
        default=None,
        description="With drafters, or a model of another tokenizer: a target, host:port, whose tokenizer and limits "
        "are taken at the start.",
    )
    heterogeneous_vocab: HeterogeneousVocab = Field(
        default="auto",
        description="For a model whose tokenizer is not the target's: intersection drafts tokens that both have, text "
        "tokenizes anew what is committed and drafted; auto takes the first where enough is shared.",
    )
    parallel_drafting: bool | None = Field(
        default=None,
        description="Draft max_draft_tokens in one pass, with mask tokens (PARD); null: where the model's config names "
        "a mask token.",
    )
    max_ahead_tokens: int = Field(
        default=16, ge=1, le=64, description="How far past the last committed token it may draft."
    )
    max_draft_tokens: int = Field(default=8, ge=1, le=64, description="Most tokens of one proposal's main path.")
    max_proposal_nodes: int = Field(default=64, ge=1, le=64, description="Most nodes of one proposal.")
    num_siblings: int = Field(
        default=2, ge=0, le=8, description="Coupled mode: runners-up proposed beside each token of the main path."
    )
    max_heads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Coupled mode: places of all trees that grow in one step; 1 drafts main paths only.",
    )
    num_sparse: int = Field(
        default=64,
        ge=1,
        le=64,
        description="Rejection mode: tokens of the truncated distribution drafted from.",
    )

    @property
    def served_name(self) -> str:
        """The name clients use."""
        if self.model:
            return super().served_name
        return self.model_name or "+".join(options.method for options in self.drafters)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if bool(self.model) == bool(self.drafters):
            raise ValueError("give either model or drafters")
        if self.drafters and self.target is None:
            raise ValueError("target: drafters need one")
        return self


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
    max_tokens_limit: int = Field(default=4096, ge=1, description="Most output tokens of a choice.")
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
