"""The setting `drafters`: the methods of drafting, each with its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from specdec.config.endpoint_options import EndpointOptions


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NgramOptions(_Options):
    """Prompt look-up: the tokens that followed an earlier occurrence of the last tokens."""

    method: Literal["ngram"] = "ngram"
    prompt_lookup_min: int = Field(default=2, ge=1, le=64)
    """Fewest last tokens that an occurrence must match."""
    prompt_lookup_max: int = Field(default=5, ge=1, le=64)
    """Most last tokens that are compared: the occurrence with the longest match wins."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min is above prompt_lookup_max")
        return self


class SuffixOptions(_Options):
    """Suffix decoding: the most frequent continuation, in the session and in earlier outputs of its tenant."""

    method: Literal["suffix"] = "suffix"
    suffix_decoding_max_tree_depth: int = Field(default=24, ge=2, le=64)
    """Tokens of the longest match."""
    suffix_decoding_max_cached_requests: int = Field(default=10000, ge=0)
    """Most outputs that are kept, of all tenants together; 0: sessions look into their own text only."""
    suffix_decoding_max_spec_factor: float = Field(default=1.0, gt=0, le=64)
    """Most nodes of a proposal per token of the match."""
    suffix_decoding_min_token_prob: float = Field(default=0.1, gt=0, le=1)
    """Lowest estimated probability of a node, including its path; less likely nodes are left out."""
    max_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Bytes for the outputs that are kept; the oldest output is dropped first."""


class PredictionOptions(_Options):
    """The predicted output that a request brings."""

    method: Literal["prediction"] = "prediction"


class LookaheadOptions(_Options):
    """Lookahead decoding: n-grams that the target draws beside its step."""

    method: Literal["lookahead"] = "lookahead"
    window_size: int = Field(default=7, ge=1, le=32)
    """Columns of the window: positions ahead for which tokens are guessed."""
    ngram_size: int = Field(default=5, ge=2, le=16)
    """Tokens of an n-gram; the window has one level less."""
    guess_set_size: int = Field(default=7, ge=1, le=32)
    """Most n-grams that are kept, and proposed, for each first token."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.window_size * (self.ngram_size - 1) > 56:
            raise ValueError("window_size times (ngram_size - 1) exceeds the 56 rows that a step has for it")
        return self


class LayerSkipOptions(_Options):
    """The target's own weights with sublayers left out."""

    method: Literal["layer_skip"] = "layer_skip"
    exit_layer: int | None = Field(default=None, ge=1)
    """Number of first layers to draft with, for models that were trained for it."""
    skip_attention_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers without attention, numbered from 0."""
    skip_mlp_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers without MLP, numbered from 0."""
    num_speculations: int = Field(default=6, ge=1, le=64)
    """Depth of the deepest proposal, in tokens."""
    skip_ratio: float = Field(default=0.45, gt=0, lt=1)
    """Share of the sublayers between the first layer and the last to leave out, where no layers are named; a search
    while serving finds which ones (SWIFT)."""
    max_search_share: float = Field(default=0.02, ge=0, le=0.5)
    """Largest share of time for the search; 0: every other sublayer is left out, without a search."""

    @property
    def searches(self) -> bool:
        """Whether the sublayers to leave out are found while serving."""
        return self.exit_layer is None and not self.skip_attention_layers and not self.skip_mlp_layers


class HeadOptions(_Options):
    """A head over the target's hidden states; each subclass is one kind."""

    method: str
    model: str = Field(min_length=1)
    """Folder with the head's files."""
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=64)
    """Depth of the deepest proposal, in tokens; None: as the head's files say."""
    speculative_eagle_topk: int = Field(default=4, ge=1, le=64)
    """Children of each node, and nodes of a depth that get children."""
    num_draft_tokens: int | None = Field(default=None, ge=1, le=64)
    """Most nodes of a tree; None: the most that a step may verify."""
    layer_ids: tuple[int, ...] | None = None
    """Layers of the target that the head reads, in place of those in its files; k is the output of k layers."""


class MedusaOptions(HeadOptions):
    """Heads side by side over the target's last hidden state."""

    method: Literal["medusa"] = "medusa"
    topk: int = Field(default=4, ge=1, le=64)
    """Tokens that each head proposes."""
    medusa_choices: tuple[tuple[Annotated[int, Field(ge=0, le=63)], ...], ...] | None = None
    """The tree, as paths of ranks; None: the likeliest paths."""


class EagleOptions(HeadOptions):
    """EAGLE-1 and 2: a layer over the target's last hidden state and the next token."""

    method: Literal["eagle"] = "eagle"


class Eagle3Options(HeadOptions):
    """EAGLE-3 and 3.1: a layer over the target's hidden states of three layers and the next token."""

    method: Literal["eagle3"] = "eagle3"


class PEagleOptions(HeadOptions):
    """P-EAGLE: EAGLE-3 that drafts all depths in one pass."""

    method: Literal["peagle"] = "peagle"


class DFlashOptions(HeadOptions):
    """DFlash: a block of tokens in one pass."""

    method: Literal["dflash"] = "dflash"


class DSparkOptions(HeadOptions):
    """DSpark: DFlash whose tokens depend on the ones before them."""

    method: Literal["dspark"] = "dspark"


class MtpOptions(HeadOptions):
    """Multi-token prediction: the module that the target's own checkpoint carries for the token after the next."""

    method: Literal["mtp"] = "mtp"
    model: str = ""
    """Folder with the module's weights and the target's config; "": the target's own."""


class OpenAiApiOptions(EndpointOptions):
    """A draft behind an OpenAI-compatible endpoint."""

    method: Literal["openai_api"] = "openai_api"
    max_tokens: int = Field(default=128, ge=1, le=4096)
    """Most completion tokens of a call."""
    max_streams: int = Field(default=16, ge=1, le=256)
    """Most calls at once."""
    stream_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Longest time of a call, in seconds."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Most prompt and completion tokens of all calls until the service is started again; None: no limit."""
    price_per_million_prompt_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    price_per_million_completion_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_cost: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Highest cost of all calls by these prices until the service is started again; None: no limit."""

    @model_validator(mode="after")
    def _check_cost(self) -> Self:
        if self.max_cost is not None and not (
            self.price_per_million_prompt_tokens or self.price_per_million_completion_tokens
        ):
            raise ValueError("max_cost needs price_per_million_prompt_tokens or price_per_million_completion_tokens")
        return self


ServiceOptions = Annotated[NgramOptions | SuffixOptions | OpenAiApiOptions, Field(discriminator="method")]
"""Options of the drafters that a draft service runs without a model."""
ModellessOptions = NgramOptions | SuffixOptions | PredictionOptions | LookaheadOptions
"""Options of the drafters without weights."""
DrafterOptions = Annotated[
    ModellessOptions
    | LayerSkipOptions
    | MedusaOptions
    | EagleOptions
    | Eagle3Options
    | PEagleOptions
    | DFlashOptions
    | DSparkOptions
    | MtpOptions,
    Field(discriminator="method"),
]


DRAFT_MODEL = "draft_model"
"""The draft's name among the names of drafters."""
HEAD_NAMES = frozenset({"medusa", "eagle", "eagle3", "peagle", "dflash", "dspark", "mtp"})
"""Names of the drafters that are heads over the target's hidden states."""
SERVICE_DRAFTER_NAMES = frozenset({"ngram", "suffix", "openai_api"})
"""Names of the drafters that a draft service runs without a model."""
DRAFTER_NAMES = frozenset({"ngram", "suffix", "prediction", "lookahead", "layer_skip"}) | HEAD_NAMES


OptionsT = TypeVar("OptionsT", DrafterOptions, ServiceOptions)


def read_drafters(value: Any) -> Any:
    """Names with commas between them, or JSON: a list of names and of objects with a `method` and its options."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith(("[", "{")):
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"is not JSON: {error}") from error
            except RecursionError as error:
                raise ValueError("is not JSON that can be read: it is nested too deeply") from error
        else:
            value = [name.strip() for name in text.split(",") if name.strip()]
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list | tuple):
        made = [{"method": item} if isinstance(item, str) else item for item in value]
        if any(isinstance(item, dict) and item.get("method") == "token_recycling" for item in made):
            raise ValueError("token_recycling was removed: use ngram or suffix, which take fewer steps on every text")
        return made
    return value


def check_drafters(drafters: tuple[OptionsT, ...]) -> tuple[OptionsT, ...]:
    """Return the drafters. Raises ValueError where a method is named twice."""
    names = [options.method for options in drafters]
    if len(set(names)) < len(names):
        raise ValueError("a method is named twice")
    return drafters


_DRAFTERS: TypeAdapter[tuple[DrafterOptions, ...]] = TypeAdapter(
    Annotated[tuple[DrafterOptions, ...], BeforeValidator(read_drafters), AfterValidator(check_drafters)]
)
_MOST_PROBLEMS = 3


def parse_drafters(text: str) -> tuple[DrafterOptions, ...]:
    """Drafters of a target, as in its setting `drafters`. Raises ValueError with the first problems."""
    try:
        return _DRAFTERS.validate_python(text)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:_MOST_PROBLEMS]
        raise ValueError("; ".join(map(describe_problem, problems))) from error


def describe_problem(problem: Mapping[str, Any]) -> str:
    """The text of a problem with a drafter; `problem` is one of pydantic's `ValidationError.errors`.

    The drafter is named by its method, not by its place in the setting.
    """
    of_method = [str(part) for part in problem["loc"] if not isinstance(part, int) and part != "drafters"]
    message = str(problem["msg"]).removeprefix("Value error, ")
    match problem["type"]:
        case "union_tag_invalid":
            known = str(problem["ctx"]["expected_tags"]).replace("'", "")
            return f"there is no drafter {problem['ctx']['tag']!r} here, only {known}"
        case "union_tag_not_found" | "model_attributes_type":
            return "a drafter is a name, or an object with its method"
        case "missing":
            message = "is required"
        case "extra_forbidden":
            message = "is not an option of this drafter"
    return ": ".join([*of_method, message])
