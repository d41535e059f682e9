"""The requests of /v1/messages and /v1/messages/count_tokens, as Anthropic defines them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specdec.gateway.api.fields import (
    MOST_TOKENS,
    CacheSalt,
    Empty,
    Items,
    Messages,
    MinP,
    PositiveCount,
    RequestModel,
    Speculation,
    Temperature,
    TopP,
)

_NO_MEANING = "Accepted and ignored."


class ToolChoiceField(RequestModel):
    """Which tools may be called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = Field(None, description="With the type tool: its name.")
    disable_parallel_tool_use: bool | None = None


class ThinkingField(RequestModel):
    """Whether the model thinks; absent: as its chat template has it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: PositiveCount | None = Field(None, description=_NO_MEANING)
    display: str | None = Field(None, description=_NO_MEANING)


class SchemaFormat(RequestModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """The form of the output."""

    effort: str | None = Field(None, description="The template's variable reasoning_effort, if it reads it.")
    format: SchemaFormat | None = None


class Conversation(RequestModel):
    """What both requests have."""

    large_fields: ClassVar[frozenset[str]] = frozenset({"messages", "system", "tools", "chat_template_kwargs"})

    model: str = Field(description="Name listed by /v1/models.")
    messages: Messages = Field(
        description="Turns with role (user, assistant, system) and content: a text, or blocks of type text, tool_use, "
        "tool_result, thinking, search_result, or document with a text. A last turn of the assistant is continued."
    )
    system: str | Items[dict[str, Any]] | None = Field(None, description="A text, or blocks of type text.")
    tools: Items[dict[str, Any]] | None = Field(None, description="Functions with name and input_schema.")
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = Field(None, description="Older name of output_config.format.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As in chats.")
    cache_control: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    context_management: dict[str, Any] | None = Field(None, description=_NO_MEANING)


class CountTokensRequest(Conversation):
    """A conversation whose tokens are counted."""


class MessagesRequest(Conversation):
    """A conversation to continue."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"container", "mcp_servers"})

    max_tokens: PositiveCount = Field(description=MOST_TOKENS)
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None

    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(None, description="As in chats.")
    min_p: MinP | None = Field(None, description="As in chats.")
    speculation: Speculation | None = Field(None, description="As in chats.")
    cache_salt: CacheSalt | None = Field(None, description="As in chats.")

    metadata: dict[str, Any] | None = Field(None, description=_NO_MEANING)
    service_tier: str | None = Field(None, description=_NO_MEANING)
    inference_geo: str | None = Field(None, description=_NO_MEANING)

    container: None = None
    mcp_servers: Empty | None = None
