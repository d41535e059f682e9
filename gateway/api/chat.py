"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from specdec.gateway.api.fields import (
    CONVERSATION,
    MOST_TOKENS,
    UNSUPPORTED_IN_ALL,
    ChatTemplateText,
    Count,
    Documents,
    Empty,
    EmptyObject,
    Items,
    Messages,
    NumLogprobs,
    PositiveCount,
    RequestModel,
    SamplingFields,
)

_NO_MEANING = "Accepted and ignored."


class PredictionPart(RequestModel):
    """A part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(RequestModel):
    """Text expected in the output, such as a file to edit."""

    type: Literal["content"]
    content: str | Items[PredictionPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(SamplingFields):
    """A conversation to continue."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_IN_ALL | {
        *("audio", "function_call", "functions", "media_io_kwargs", "modalities"),
        *("mm_processor_kwargs", "moderation", "web_search_options"),
    }
    large_fields: ClassVar[frozenset[str]] = CONVERSATION

    messages: Messages = Field(
        description="Oldest first: objects with role (system, developer, user, assistant, tool) and content, which is "
        "a text or a list of parts of type text.",
    )
    max_completion_tokens: PositiveCount | None = Field(None, description=MOST_TOKENS)
    max_tokens: PositiveCount | None = Field(
        None, description="Older name of max_completion_tokens, which takes precedence."
    )
    logprobs: bool | None = Field(None, description="Return log-probabilities of the output.")
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives per token; needs logprobs.")
    tools: Items[dict[str, Any]] | None = Field(None, description="Functions that may be called.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required or a named function.")
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="A variable of the chat template, if that reads it.")
    include_reasoning: bool | None = Field(None, description="Return a reasoning model's reasoning; default true.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = Field(None, description="Text that most of the output is expected to repeat.")
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    chat_template: ChatTemplateText | None = None
    documents: Documents | None = None

    metadata: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    prompt_cache_key: str | None = Field(None, description=_NO_MEANING)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    prompt_cache_retention: str | None = Field(None, description=_NO_MEANING)
    safety_identifier: str | None = Field(None, description=_NO_MEANING)
    service_tier: str | None = Field(None, description=_NO_MEANING)
    store: bool | None = Field(None, description="Accepted; nothing is kept.")
    verbosity: str | None = Field(None, description=_NO_MEANING)

    audio: None = None
    function_call: None = None
    functions: Empty | None = None
    media_io_kwargs: EmptyObject | None = None
    mm_processor_kwargs: EmptyObject | None = None
    modalities: Items[Literal["text"]] | None = None
    moderation: None = None
    web_search_options: None = None

    @property
    def most_tokens(self) -> Count | None:
        """Most output tokens of a choice; None: as many as fit the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
