"""Settings of a draft."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)
from pydantic_settings import NoDecode

from specdec.config.drafter_options import ServiceOptions, check_drafters, read_drafters
from specdec.config.replica import ReplicaSettings
from specdec.wire.settings import Address, Addresses, PeerSettings

HeterogeneousVocab = Literal["auto", "intersection", "text"]


class DraftSettings(ReplicaSettings, PeerSettings):
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
        description="Drafters in place of a model, without torch: ngram, suffix and openai_api, with options as "
        'in a target\'s drafters, [{"method": "openai_api", "base_url": "https://host/v1", "model": "M"}].',
    )
    target: Address | None = Field(
        default=None,
        description="Target, host:port, whose tokenizer and limits the draft takes at its start; for drafters, and for "
        "a model with another tokenizer.",
    )
    link_targets: Addresses = Field(
        default=(),
        description="Targets that the draft may call to take a session's tokens from them, without the coordinator "
        "between: host:port as coordinators name them, or dns:///name:port for all addresses of a name; none: all "
        "proposals are relayed.",
    )
    heterogeneous_vocab: HeterogeneousVocab = Field(
        default="auto",
        description="For a model whose tokenizer is not the target's: intersection drafts tokens that both have, text "
        "tokenizes committed and drafted text anew; auto takes intersection where enough tokens are shared.",
    )
    parallel_drafting: bool | None = Field(
        default=None,
        description="Draft max_draft_tokens in one pass, with mask tokens (PARD); null: where the model's config names "
        "a mask token.",
    )
    max_ahead_tokens: int = Field(
        default=16, ge=1, le=64, description="Most tokens that are drafted past the last committed one."
    )
    max_draft_tokens: int = Field(default=8, ge=1, le=64, description="Most tokens of one proposal's main path.")
    max_proposal_nodes: int = Field(default=64, ge=1, le=64, description="Most nodes of one proposal.")
    num_siblings: int = Field(
        default=2,
        ge=0,
        le=8,
        description="Runners-up proposed beside each token of the main path; in rejection mode, likely corrections "
        "below which chains are drafted ahead.",
    )
    max_heads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Most nodes of a tree that are extended in one step; 1 drafts main paths only.",
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
            raise ValueError("model, drafters: set exactly one of them")
        if self.drafters and self.target is None:
            raise ValueError("target: drafters need a target; set its host:port")
        return self
