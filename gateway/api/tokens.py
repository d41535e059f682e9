"""Requests and answers of /tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, Field

from specdec.gateway.api.fields import (
    CONVERSATION,
    ChatTemplateText,
    Documents,
    EmptyObject,
    Items,
    Messages,
    RequestModel,
    TokenIds,
)


class TokenizeBody(RequestModel):
    """A text (`prompt`) or a conversation (`messages`), one of the two."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"mm_processor_kwargs"})
    large_fields: ClassVar[frozenset[str]] = CONVERSATION

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a text, false for a conversation.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: ChatTemplateText | None = None
    documents: Documents | None = None
    return_token_strs: bool | None = None

    mm_processor_kwargs: EmptyObject | None = None


class TokenizeAnswer(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(RequestModel):
    """Token ids to decode."""

    token_fields: ClassVar[frozenset[str]] = frozenset({"tokens"})

    model: str | None = None
    tokens: TokenIds


class DetokenizeAnswer(BaseModel):
    """Text of token ids, special tokens included."""

    prompt: str


class TokenizerInfoAnswer(BaseModel):
    """The tokenizer's description."""

    tokenizer_class: str = Field(description="Always PreTrainedTokenizerFast.")
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None
    vocab_size: int
    model_max_length: int
