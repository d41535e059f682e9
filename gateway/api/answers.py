"""Answers, as they are described to clients. They are built as dictionaries, which tests hold against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class AnswerModel(BaseModel):
    """A part of an answer, with no other fields than these."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptTokensDetails(AnswerModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in a prefix cache.")


class CompletionTokensDetails(AnswerModel):
    """Of the output's tokens, where the request had a prediction."""

    accepted_prediction_tokens: int = Field(description="Taken over from the prediction.")
    rejected_prediction_tokens: int = Field(description="Of the prediction, tried and not taken.")


class UsageAnswer(AnswerModel):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculativeDecoding(AnswerModel):
    """How speculation went, over all choices."""

    num_spec_steps: int = Field(description="Steps that verified draft tokens.")
    num_draft_tokens: int = Field(description="Draft tokens that were verified.")
    num_accepted_draft_tokens: int = Field(description="Those that were accepted.")
    num_spec_tokens: int = Field(description="The most draft tokens on one path of a step.")
    mean_acceptance_length: float | None = Field(description="Tokens per such step.")
    draft_acceptance_rate: float | None = Field(description="Accepted of verified.")
    acceptance_histogram: list[int] = Field(description="Steps that accepted 0, 1, 2, ... draft tokens.")


class Metrics(AnswerModel):
    """How the request was served."""

    speculative_decoding: SpeculativeDecoding


class TokenOrigin(AnswerModel):
    """Where an output token came from."""

    id: int
    text: str
    origin: Literal["prefill", "draft", "recovered", "bonus", "decode", "forced"]
    round: int = Field(description="The step that committed it, from 0.")
    depth: int | None = Field(description="Of a draft token: its distance from the last token committed before.")
    drafter: str | None = Field(description="Of a draft token: who proposed it, where that is known.")


class StepNode(AnswerModel):
    """A token that was proposed."""

    id: int
    text: str
    parent: int | None = Field(description="Its parent's place in the list; null: it follows the tokens before.")
    score: float = Field(description="The drafter's estimate that it is accepted if its parent is.")
    logprob: float | None = Field(description="Under the target's raw logits, of a verified one.")
    state: Literal["accepted", "rejected", "unverified"]
    drafter: str | None = Field(
        default=None,
        description="Who proposed it first: draft_model, a drafter of the target's own, or forced, where a constraint "
        "allowed nothing else; null: the target does not say.",
    )


class DecodingStep(AnswerModel):
    """A step of the target: what it had to choose from, and what it took."""

    start: int = Field(description="Place of its first token in the output.")
    num_tokens: int = Field(description="Tokens that it committed.")
    nodes: list[StepNode] = Field(description="What was proposed; empty in a plain step.")
    at_ms: float = Field(description="When it was decided, since the request came to the coordinator.")
    step_ms: float = Field(description="The forward pass and the sampling.")
    hold_off_ms: float = Field(description="How long it waited for a draft.")
    draft_ms: float = Field(description="Drafting of what it used.")
    suspended: bool = Field(description="Speculation rests after it, as plain decoding was measured to be faster.")


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
    """What is to be called."""

    name: str | None = None
    arguments: str


class ToolCall(AnswerModel):
    """A call; in chunks a piece of it."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: FunctionCall


class ChatMessage(AnswerModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatDelta(AnswerModel):
    """What comes to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChoiceExtras(AnswerModel):
    """What choices of all kinds have."""

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
    """What all answers have."""

    id: str
    created: int
    model: str
    system_fingerprint: str = Field(description="The numerics id: with it and the seed the output is fixed.")


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
    """Four lists with an entry per token."""

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
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int


class ModelList(AnswerModel):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(AnswerModel):
    """The software."""

    version: str
