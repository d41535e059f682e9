"""The request and the answer of /v1/responses: text in, text out; responses are not stored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec.gateway.api.fields import (
    MOST_TOKENS,
    CacheSalt,
    Empty,
    Items,
    JsonObjectFormat,
    JsonSchema,
    Messages,
    MinP,
    NumLogprobs,
    PositiveCount,
    RequestModel,
    Speculation,
    Temperature,
    TextFormat,
    TopP,
)

_NO_MEANING = "Accepted and ignored."


class ResponseSchema(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class ResponseText(RequestModel):
    """The form of the output."""

    format: Annotated[TextFormat | JsonObjectFormat | ResponseSchema, Field(discriminator="type")] | None = None
    verbosity: str | None = Field(None, description=_NO_MEANING)


class ResponseReasoning(RequestModel):
    """Reasoning options."""

    effort: str | None = Field(None, description="A variable of the chat template, if that reads it.")
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(RequestModel):
    """Extras of a stream."""

    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class ResponsesRequest(RequestModel):
    """A text, or a conversation, to answer."""

    unsupported: ClassVar[frozenset[str]] = frozenset(
        {
            *("background", "conversation", "context_management", "include", "max_tool_calls", "moderation"),
            *("previous_response_id", "prompt", "store", "tools", "truncation"),
        }
    )
    large_fields: ClassVar[frozenset[str]] = frozenset({"input", "chat_template_kwargs"})

    model: str | None = Field(None, description="Name listed by /v1/models; default: the served model.")
    input: str | Messages = Field(
        description="A text, or messages with role and content, which is a text or a list of parts of text."
    )
    instructions: str | None = Field(None, description="A system message before all others.")
    max_output_tokens: PositiveCount | None = Field(None, description=MOST_TOKENS)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives per token; absent: no log-probabilities.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    reasoning: ResponseReasoning | None = None
    text: ResponseText | None = None

    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(None, description="As in chats.")
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = Field(None, description="As in chats.")
    min_p: MinP | None = Field(None, description="As in chats.")
    stop: str | Items[str] | None = Field(None, description="As in chats.")
    speculation: Speculation | None = Field(None, description="As in chats.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As in chats.")
    cache_salt: CacheSalt | None = Field(None, description="As in chats.")
    return_token_origins: bool | None = Field(
        None, description="As in chats: token_origins of each delta, and of the answer."
    )
    return_steps: bool | None = Field(None, description="As in chats: steps of each delta, and of the answer.")

    metadata: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    parallel_tool_calls: bool | None = Field(None, description=_NO_MEANING)
    prompt_cache_key: str | None = Field(None, description=_NO_MEANING)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    prompt_cache_retention: str | None = Field(None, description=_NO_MEANING)
    safety_identifier: str | None = Field(None, description=_NO_MEANING)
    service_tier: str | None = Field(None, description=_NO_MEANING)
    tool_choice: Literal["auto", "none"] | None = Field(None, description=_NO_MEANING)
    user: str | None = Field(None, description=_NO_MEANING)

    background: Literal[False] | None = None
    context_management: Empty | None = None
    conversation: None = None
    include: Empty | None = None
    max_tool_calls: None = None
    moderation: None = None
    previous_response_id: None = Field(None, description="Responses are not kept: send the conversation.")
    prompt: None = None
    store: Literal[False] | None = Field(None, description="Responses are not kept; absent is false.")
    tools: Empty | None = None
    truncation: Literal["disabled"] | None = None


class ResponseAnswer(BaseModel):
    """The answer of /v1/responses as at OpenAI, with `metrics` and `system_fingerprint` as in chats, and
    `token_origins` and `steps` if the client wants them.
    """

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]


class ResponseEvent(BaseModel):
    """An event of a streamed answer; more fields depend on the type, as at OpenAI."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
