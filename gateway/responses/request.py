"""The request and the answer of /v1/responses, as OpenAI defines them; responses are not stored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec.gateway.api.fields import (
    MOST_TOKENS,
    CacheSalt,
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

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""All but the first two belong to items that are never answered."""
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
    summary: str | None = Field(None, description="Accepted; thoughts are answered whole, summaries are empty.")
    generate_summary: str | None = Field(None, description=_NO_MEANING)
    context: str | None = Field(None, description="Accepted; the chat template decides which thoughts it renders.")
    mode: str | None = Field(None, description=_NO_MEANING)


class ResponseStreamOptions(RequestModel):
    """Extras of a stream."""

    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class ResponsesRequest(RequestModel):
    """A text, or a conversation, to answer."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"background", "conversation", "moderation", "prompt"})
    large_fields: ClassVar[frozenset[str]] = frozenset({"input", "tools", "chat_template_kwargs"})

    model: str | None = Field(None, description="Name listed by /v1/models; default: the served model.")
    input: str | Messages = Field(
        description="A text, or items of type message, reasoning, function_call, function_call_output, "
        "custom_tool_call and custom_tool_call_output, as answers have them. A last message of the assistant with the "
        "status incomplete is continued."
    )
    instructions: str | None = Field(
        None, description="A system message before all others; those at the beginning join it."
    )
    tools: Items[dict[str, Any]] | None = Field(
        None, description="Functions with name and parameters, and namespaces of functions."
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(
        None, description="none, auto, required, a named function, or allowed_tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: calls after the first are left out.")
    max_output_tokens: PositiveCount | None = Field(None, description=MOST_TOKENS)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives per token; asks for log-probabilities.")
    include: Items[Includable] | None = Field(
        None, description="Encrypted content of reasoning (opaque, not secret), or log-probabilities of the text."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    reasoning: ResponseReasoning | None = None
    text: ResponseText | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest items are left out of a conversation that is too long."
    )

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

    client_metadata: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    context_management: Items[dict[str, Any]] | None = Field(None, description="Accepted; nothing is compacted.")
    max_tool_calls: PositiveCount | None = Field(None, description="Accepted; no tool is run here.")
    metadata: dict[str, Any] | None = Field(None, description="Returned in the answer.")
    prompt_cache_key: str | None = Field(None, description=_NO_MEANING)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    prompt_cache_retention: str | None = Field(None, description=_NO_MEANING)
    safety_identifier: str | None = Field(None, description=_NO_MEANING)
    service_tier: str | None = Field(None, description=_NO_MEANING)
    store: bool | None = Field(None, description="Accepted; responses are never kept, and the answer says so.")
    user: str | None = Field(None, description=_NO_MEANING)

    background: Literal[False] | None = None
    conversation: None = None
    moderation: None = None
    previous_response_id: str | None = Field(
        None, description="Refused: responses are not kept. Send the conversation."
    )
    prompt: None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return 0 if self.top_logprobs is None and LOGPROBS in (self.include or ()) else self.top_logprobs

    @property
    def encrypts_reasoning(self) -> bool:
        """Whether reasoning items have encrypted content."""
        return ENCRYPTED in (self.include or ())


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
