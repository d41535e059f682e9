"""Settings of a target, and of the draft that it may run itself."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import NoDecode

from specdec.config.draft import DraftSettings
from specdec.config.drafter_options import DrafterOptions, check_drafters, read_drafters
from specdec.config.endpoint_options import ApiTargetOptions
from specdec.config.generation_config import FIELDS, defaults_of
from specdec.config.nodes import NodeSettings
from specdec.config.replica import ReplicaSettings
from specdec.config.retired import REMOVED
from specdec.service.settings import Names

_SAME_FOR_OWN_DRAFT = (
    "device", "native", "self_test", "max_sessions", "max_batch_seqs",
    "max_draft_tokens", "max_proposal_nodes", "verify_mode",
)  # fmt: skip


class OwnDraftOptions(BaseModel):
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
        raise ValueError(f"is not JSON: {error}") from error


def _read_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error


def _checked_defaults(values: dict[str, Any]) -> dict[str, Any]:
    defaults_of(values)
    return values


class TargetSettings(NodeSettings, ReplicaSettings):
    """Settings of a target replica."""

    env_prefix: ClassVar[str] = "SPECDEC_TARGET_"

    port: int = Field(default=50052, ge=0, le=65535, description="Port of the gRPC server; 0 takes a free one.")
    metrics_port: int | None = Field(
        default=9092,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; 0 takes a free one, null is off.",
    )
    max_proposal_nodes: int = Field(default=64, ge=1, le=64, description="Most nodes of a proposal or a verified tree.")
    max_draft_tokens: int = Field(
        default=8,
        ge=0,
        le=64,
        description="Most draft tokens verified per session and step; 0 never speculates.",
    )
    hold_off_ms: float | None = Field(
        default=None,
        ge=0,
        description="Longest wait of a step for a draft, in milliseconds; null: as long as the cost model finds worth "
        "it.",
    )
    adaptive_speculation: bool = Field(
        default=True,
        description="Suspend drafting for sessions whose plain decoding is measured to be faster.",
    )
    generation_config: str = Field(
        default="auto",
        min_length=1,
        description="Where the sampling parameters of requests that name none come from: auto is the model's "
        "generation_config.json, none is neutral values, anything else is a folder with such a file.",
    )
    override_generation_config: Annotated[
        dict[str, Any], NoDecode, BeforeValidator(_read_json), AfterValidator(_checked_defaults)
    ] = Field(
        default_factory=dict,
        description=f"JSON object of such parameters, in place of the file's: {', '.join(FIELDS)}.",
    )
    own_draft: Annotated[OwnDraftOptions | None, NoDecode, BeforeValidator(_read_own_draft)] = Field(
        default=None,
        description="Draft model that this process runs itself, in turns with the target, on the same cores or device: "
        'its folder or hub id, or JSON with any setting of a draft, {"model": "M", "weight_quantization": "int8"}. '
        "Draft services are then not needed, and their proposals are not used.",
    )

    drafters: Annotated[
        tuple[DrafterOptions, ...], NoDecode, BeforeValidator(read_drafters), AfterValidator(check_drafters)
    ] = Field(
        default=(),
        description="Drafters beside the draft: names separated by commas, or JSON with options, "
        '[{"method": "eagle3", "model": "DIR"}, {"method": "ngram", "prompt_lookup_max": 4}, "suffix"]. '
        "Drafters without weights are ngram, suffix, prediction, lookahead and layer_skip (the target without some of "
        "its layers); heads over the target's hidden states are medusa, eagle, eagle3, peagle, dflash and dspark, "
        "and mtp is the module that the target's own checkpoint carries.",
    )

    api: Annotated[ApiTargetOptions | None, NoDecode, BeforeValidator(_read_json)] = Field(
        default=None,
        description="An OpenAI-compatible endpoint that verifies in place of a model here, as JSON, "
        '{"base_url": "https://host/v1", "model": "M"}; of `model` the tokenizer and config are read, and no weights.',
    )

    tls_draft_names: Names = Field(
        default=(),
        description="DNS or common names of client certificates of drafts, which may call Link, GetReplicaInfo and "
        "GetTokenizer only; needs tls_allowed_client_names, without which every certificate may call.",
    )

    @property
    def draft_names(self) -> tuple[str, ...]:
        """See `ServiceSettings.draft_names`."""
        return self.tls_draft_names

    @property
    def most_engine_restarts(self) -> int:
        """See `ReplicaServiceSettings.most_engine_restarts`: all nodes of a group start anew together."""
        return self.engine_restarts if self.nnodes == 1 else 0

    @model_validator(mode="after")
    def _check_draft_names(self) -> Self:
        if self.tls_draft_names and not self.tls_allowed_client_names:
            raise ValueError("tls_draft_names needs tls_allowed_client_names")
        return self

    @property
    def own_draft_settings(self) -> DraftSettings | None:
        """The settings of the draft in this process; None without one."""
        if self.own_draft is None:
            return None
        same = {name: getattr(self, name) for name in _SAME_FOR_OWN_DRAFT}
        own = {name: value for name, value in self.own_draft.model_dump().items() if name not in REMOVED}
        return DraftSettings.model_validate({**same, **own})

    @model_validator(mode="after")
    def _check_kv_cache(self) -> Self:
        if self.kv_cache_dtype != "auto":
            raise ValueError("kv_cache_dtype changes a target's output: set it at drafts, or in own_draft, only")
        return self

    @model_validator(mode="after")
    def _check_api(self) -> Self:
        if self.api is not None and (self.own_draft is not None or self.drafters):
            raise ValueError("api: own_draft and drafters run beside a model, and there is none; unset them")
        return self

    @model_validator(mode="after")
    def _check_ranks_of_nodes(self) -> Self:
        if self.nnodes > 1 and self.tensor_parallel_size % self.nnodes:
            raise ValueError(f"nnodes {self.nnodes} does not divide tensor_parallel_size {self.tensor_parallel_size}")
        return self

    @model_validator(mode="after")
    def _check_own_draft(self) -> Self:
        if self.own_draft is not None:
            if self.tensor_parallel_size > 1:
                raise ValueError("own_draft: not with tensor_parallel_size above 1; use a draft service")
            try:
                own = self.own_draft_settings
            except ValidationError as error:
                raise ValueError(f"own_draft: {error}") from error
            if own is not None and own.device not in (self.device, "cpu"):
                raise ValueError(f"own_draft: device {own.device}, but a process uses one GPU; leave it out")
        return self
