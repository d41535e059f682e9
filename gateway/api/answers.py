"""Models of the answers, for clients' documentation. Answers are built as dictionaries; tests check them against
these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class AnswerModel(BaseModel):
    """A part of an answer, without further fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptTokensDetails(AnswerModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Prompt tokens found in a prefix cache.")


class CompletionTokensDetails(AnswerModel):
    """Details of the output's tokens, if the request had a prediction."""

    accepted_prediction_tokens: int = Field(description="Output tokens taken from the prediction.")
    rejected_prediction_tokens: int = Field(description="Tokens of the prediction that were verified and rejected.")


class UsageAnswer(AnswerModel):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculativeDecoding(AnswerModel):
    """Speculation statistics over all choices."""

    num_spec_steps: int = Field(description="Steps that verified draft tokens.")
    num_draft_tokens: int = Field(description="Draft tokens that were verified.")
    num_accepted_draft_tokens: int = Field(description="Draft tokens that were accepted.")
    num_spec_tokens: int = Field(description="Most draft tokens on one path of a step.")
    mean_acceptance_length: float | None = Field(description="Tokens committed per verifying step.")
    draft_acceptance_rate: float | None = Field(description="Accepted draft tokens per verified one.")
    acceptance_histogram: list[int] = Field(description="Steps that accepted 0, 1, 2, ... draft tokens.")


class Metrics(AnswerModel):
    """Statistics of the request."""

    speculative_decoding: SpeculativeDecoding


class TokenOrigin(AnswerModel):
    """The origin of an output token."""

    id: int
    text: str
    origin: Literal["prefill", "draft", "recovered", "bonus", "decode", "forced"]
    round: int = Field(description="Number of the step that committed it, from 0.")
    depth: int | None = Field(description="Depth of a draft token below the last token committed before.")
    drafter: str | None = Field(description="Drafter of a draft token, if known.")


class StepNode(AnswerModel):
    """A proposed token."""

    id: int
    text: str
    parent: int | None = Field(description="Index of its parent in the list; null: it follows the committed tokens.")
    score: float = Field(description="The drafter's estimate of the probability that it is accepted if its parent is.")
    logprob: float | None = Field(description="Log-probability under the target's raw logits, if verified.")
    state: Literal["accepted", "rejected", "unverified"]
    drafter: str | None = Field(
        default=None,
        description="First drafter that proposed it: draft_model, a drafter of the target's own, or forced, if a "
        "constraint allowed nothing else; null: the target does not report it.",
    )


class DecodingStep(AnswerModel):
    """A step of the target: the proposed tree, and the committed tokens."""

    start: int = Field(description="Index of its first token in the output.")
    num_tokens: int = Field(description="Number of committed tokens.")
    nodes: list[StepNode] = Field(description="Proposed tokens; empty in a plain step.")
    at_ms: float = Field(description="Milliseconds from the request's arrival at the coordinator to the step's end.")
    step_ms: float = Field(description="Milliseconds of forward pass and sampling.")
    hold_off_ms: float = Field(description="Milliseconds that it waited for a draft.")
    draft_ms: float = Field(description="Milliseconds of drafting its tree.")
    suspended: bool = Field(
        description="Speculation is suspended after it, as plain decoding was measured to be faster."
    )


class TopLogprob(AnswerModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """One output token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    """One entry per output token."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


class FunctionCall(AnswerModel):
    """A called function."""

    name: str | None = None
    arguments: str


class ToolCall(AnswerModel):
    """A call of a function; in chunks, a piece of one."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: FunctionCall


class ChatMessage(AnswerModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatDelta(AnswerModel):
    """The next piece of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChoiceExtras(AnswerModel):
    """Fields of all choices."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = Field(None, description="The stop string or token that matched.")
    token_ids: list[int] | None = None
    token_origins: list[TokenOrigin] | None = None
    steps: list[DecodingStep] | None = None


class ChatChoice(ChoiceExtras):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(ChoiceExtras):
    """The next piece of one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


PromptLogprobs = list[dict[str, Any] | None]


class Answer(AnswerModel):
    """Fields of all answers."""

    id: str
    created: int
    model: str
    system_fingerprint: str = Field(description="The numerics id: it and the seed determine the output.")


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    metrics: Metrics
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(Answer):
    """An event of a streamed answer of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None
    metrics: Metrics | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(AnswerModel):
    """Four lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceExtras):
    """One text; in chunks the next piece of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(Answer):
    """The answer of /v1/completions, and an event of a streamed one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None
    metrics: Metrics | None = None


class ModelCard(AnswerModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int | None = Field(description="Positions; null: a model that sleeps, and was not asked.")
    type: Literal["model"] | None = Field(None, description="This and the next two: for Anthropic's clients only.")
    display_name: str | None = None
    created_at: str | None = None


class ModelList(AnswerModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False] | None = Field(None, description="This and the next two: for Anthropic's clients only.")
    first_id: str | None = None
    last_id: str | None = None


class VersionAnswer(AnswerModel):
    """The software's version."""

    version: str
