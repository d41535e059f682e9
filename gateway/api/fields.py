"""Fields shared by several requests, with their allowed values."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from specdec.constraints.limits import MAX_CHOICES
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.sampling_limits import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_BYTES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    Range,
)

MAX_REQUEST_ID_CHARS = 128
MOST_TOKENS = (
    "Most output tokens of a choice. Default: as many as fit the context and the deployment's limit, if it has one. "
    "A larger number is cut to these, or refused if the deployment is set so."
)
_MOST_COUNT = 2**32 - 1


def _within(range_: Range) -> Any:
    if range_.open_low:
        return Field(gt=range_.low, le=range_.high)
    return Field(ge=range_.low, le=range_.high)


class PackedIds:
    """Many token ids, encoded as for gRPC: a Python list takes ten times their bytes."""

    __slots__ = ("_num", "wire")

    def __init__(self) -> None:
        self._num = 0
        self.wire = bytearray()
        """An encoded `api.TokenIds`."""

    def __len__(self) -> int:
        """Number of ids."""
        return self._num

    def add(self, ids: list[int]) -> None:
        """Append ids. Raises ValueError or TypeError if one is invalid."""
        self.wire += api.TokenIds(token_ids=ids).SerializeToString()
        self._num += len(ids)


def _packed(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, PackedIds) else check(value)


def _until_wrong(biases: Any) -> Any:
    """The biases, or the first invalid one alone: pydantic would report each."""
    if not isinstance(biases, dict):
        return biases
    for token_id, bias in biases.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (_TOKEN_ID_TEXT.fullmatch(token_id) and is_number and LOGIT_BIAS.fault_of(bias) is None):
            return {token_id: bias}
    return biases


_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list checked up to its first wrong item: reporting millions would block the process for seconds."""
Messages = Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=16 * 1024)]
Documents = Annotated[
    Items[dict[str, Any]], Field(description="Documents for templates that read the variable `documents`.")
]
ChatTemplateText = Annotated[
    str,
    Field(
        min_length=1,
        description="Jinja source that replaces the model's template, if the coordinator trusts clients' templates.",
    ),
]
TokenId = Annotated[int, Field(ge=0, le=_MOST_COUNT)]
TokenIds = Annotated[Items[TokenId], WrapValidator(_packed)]
"""Token ids; long lists are `PackedIds`."""
Count = Annotated[int, Field(ge=0, le=_MOST_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=_MOST_COUNT)]
Temperature = Annotated[float, _within(RANGES["temperature"])]
TopP = Annotated[float, _within(RANGES["top_p"])]
MinP = Annotated[float, _within(RANGES["min_p"])]
RepetitionPenalty = Annotated[float, _within(RANGES["repetition_penalty"])]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_BYTES)]
Penalty = Annotated[float, _within(RANGES["presence_penalty"])]
Bias = Annotated[float, _within(LOGIT_BIAS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_TOKEN_ID_TEXT = re.compile(r"[0-9]{1,9}")
TokenIdText = Annotated[str, Field(pattern=rf"^{_TOKEN_ID_TEXT.pattern}$")]
Empty = Annotated[list[Any], Field(max_length=0)]
"""A list that must be empty, for an unsupported field."""
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]


class RequestModel(BaseModel):
    """A request's body or a part of it. Types are strict: no number is read from a text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Unsupported fields, accepted only with the value that asks for nothing."""
    token_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that may have millions of token ids."""
    meaningful: ClassVar[frozenset[str]] = frozenset({"add_special_tokens"})
    """Fields whose values mean something here, also those that ask for nothing at other servers."""
    large_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that may have hundreds of thousands of other values."""

    @model_validator(mode="before")
    @classmethod
    def _until_unknown(cls, value: Any) -> Any:
        """The fields, with only the first unknown one: pydantic would report each."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in value if name not in known), None)
        if unknown is None:
            return value
        return {name: field for name, field in value.items() if name in known or name == unknown}


class StreamOptions(RequestModel):
    """Extras of a stream."""

    include_usage: bool | None = Field(None, description="End with a chunk of usage without choices.")
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: the usage so far in each chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class Speculation(RequestModel):
    """Overrides of the deployment's speculation settings. Coupled verification never changes the output."""

    enabled: bool | None = Field(None, description="Speculate at all; default true.")
    verify_mode: Literal["coupled", "rejection"] | None = Field(None, description="Default: the deployment's.")
    rejection_sample_method: Literal["standard", "block"] | None = Field(
        None,
        description="Test of rejection mode on chains: per token (standard) or per block. Default: the deployment's.",
    )
    max_draft_tokens: Count | None = Field(None, description="At most this many draft tokens per step.")
    time_per_token_ms: Annotated[float, Field(ge=0.001, le=60_000)] | None = Field(
        None, description="Wanted mean time per output token after the first."
    )
    drafters: Annotated[Items[str], Field(max_length=64)] | None = Field(
        None, description="Drafters that may propose; draft_model is the draft service. Default: all."
    )


class StructuredOutputs(RequestModel):
    """Constraint on the output, with vLLM's names. Exactly one of the first six is set."""

    unsupported: ClassVar[frozenset[str]] = frozenset()

    json_schema: str | dict[str, Any] | bool | None = Field(None, alias="json", description="JSON of this JSON schema.")
    regex: str | None = Field(None, description="Regular expression that matches the whole output.")
    choice: Annotated[Items[str], Field(max_length=MAX_CHOICES)] | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="Grammar of the output, in llguidance's form of Lark.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="Constrained parts in free text: xgrammar's structural tag, as JSON or its text."
    )

    disable_fallback: bool | None = Field(None, description="Accepted; there is no fallback.")
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None


class TextFormat(RequestModel):
    """Unconstrained output."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A JSON schema with a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="Absent: any JSON object.")
    strict: bool | None = Field(
        None,
        description="Refuse keywords that cannot be enforced; else they are left out and named in a header.",
    )


class JsonSchemaFormat(RequestModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(RequestModel):
    """Constrained parts in free text: xgrammar's structural tag, by its format or in the older form."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = Field(None, description="A format with its type, such as triggered_tags.")
    structures: Items[dict[str, Any]] | None = Field(None, description="Objects with begin, schema and end.")
    triggers: Items[str] | None = Field(None, description="With structures: texts that begin one.")


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class SamplingFields(RequestModel):
    """Sampling, ends of choices, and extras of the answer, for chats and completions."""

    model: str | None = Field(None, description="Name listed by /v1/models; default: the served model.")
    temperature: Temperature | None = Field(None, description="0 is greedy; default: the model's, else 1.")
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_COUNT)] | None = Field(None, description="-1 and 0 keep all.")
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenIdText, Bias], BeforeValidator(_until_wrong)] | None = Field(
        None, description="Bias by token id."
    )
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = Field(
        None, description="Only these tokens are sampled."
    )
    bad_words: Annotated[Items[str], Field(max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="Texts whose token sequences the output never contains."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        None, description="Equal seeds give equal output while system_fingerprint is equal."
    )
    n: PositiveCount | None = Field(None, description="Number of choices; default 1.")
    stop: str | Items[str] | None = Field(None, description="Strings that end a choice.")
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description="Tokens that end a choice."
    )
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; default true.")
    spaces_between_special_tokens: Literal[True] | None = None
    truncate_prompt_tokens: PositiveCount | None = Field(None, description="Keep only the prompt's last tokens.")
    prompt_logprobs: NumLogprobs | None = Field(None, description="Alternatives per prompt token; not for streams.")
    return_token_ids: bool | None = Field(None, description="Return the token ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Name tokens in log-probabilities token_id:ID.")
    return_token_origins: bool | None = Field(None, description="Return the origin of each token.")
    return_steps: bool | None = Field(None, description="Return each step's proposed tree and committed tokens.")
    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema or structural_tag."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="Constraint on the output.")
    speculation: Speculation | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(None, description="Lower goes first.")
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS, pattern=r"^[!-~]+$")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = Field(
        None,
        description="Separates its cached prefixes from requests with another salt or none; 128 bytes.",
    )
    user: str | None = Field(None, description="Accepted and ignored.")

    logits_processors: Empty | None = None
    thinking_token_budget: None = None
    use_beam_search: Literal[False] | None = None
    vllm_xargs: EmptyObject | None = None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def num_choices(self) -> int:
        """`n` with its default."""
        return self.n or 1

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether all chunks of a stream have the usage."""
        return self.has_usage_chunk and bool(self.stream_options and self.stream_options.continuous_usage_stats)


CONVERSATION = frozenset({"messages", "tools", "documents", "chat_template_kwargs"})
"""Fields bounded only by the conversation's limit."""
UNSUPPORTED_IN_ALL = frozenset(
    {
        *("logits_processors", "thinking_token_budget"),
        *("use_beam_search", "vllm_xargs", "spaces_between_special_tokens"),
    }
)
