"""Chats rendered by specdec and by transformers with the same template."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.scripted.model import make_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Hello."}


def tokenizer_with(template: Any, **config: Any) -> TextTokenizer:
    return TextTokenizer(make_tokenizer().to_str(), {"chat_template": template, **SPECIAL, **config})


@functools.cache
def tokenizer_here(template: str) -> TextTokenizer:
    return tokenizer_with(template)


@functools.cache
def tokenizer_there(template: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), chat_template=template, **SPECIAL)


def render(template: Any, chat: api.ChatMessages, most_bytes: int = 10**6) -> str:
    tokenizer = tokenizer_here(template) if isinstance(template, str) else tokenizer_with(template)
    compiled = tokenizer.chat_template(chat.chat_template)
    return compiled.render(read_conversation(chat, compiled.reserved_variables), most_bytes)


def render_there(template: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer_there(template).apply_chat_template(messages, tokenize=False, **options)


def refusal(template: Any, chat: api.ChatMessages, most_bytes: int = 10**6) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(template, chat, most_bytes)
    return caught.value
