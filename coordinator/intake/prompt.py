"""From what a client sent to the prompt's token ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.intake.tokenizing import TokenizingTurns
from specdec.coordinator.intake.validation import (
    CheckedSampling,
    Limits,
    check_num_messages,
    check_prediction,
    check_prediction_length,
    check_prompt,
    check_prompt_bytes,
    check_prompt_length,
)
from specdec.coordinator.text.bad_words import bad_word_sequences
from specdec.coordinator.text.request_templates import check_request_template
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

_INLINE_BYTES = 8192
"""More would hold up the other streams of this event loop; for less, a thread costs more than it saves."""
_INLINE_MESSAGES = 64
"""The same for messages, which cost a template time even when they are empty."""


class PromptReader:
    """Reads prompts of all three kinds, for one caller. Long texts wait for their tenant's turn in a thread."""

    def __init__(
        self, tokenizer: TextTokenizer, limits: Limits, turns: TokenizingTurns, tenant: str = "", weight: float = 1.0
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        # More text than a context of the longest tokens is not worth reading, even to keep the end of it.
        most_bytes = min(limits.max_prompt_bytes, limits.max_model_len * tokenizer.longest_token_bytes)
        self._prompt_limits = replace(limits, max_prompt_bytes=most_bytes)
        self._turns = turns
        self._tenant = tenant
        self._weight = weight

    async def read(self, body: api.GenerateRequest, sampling: CheckedSampling) -> list[int]:
        """The prompt, checked and truncated.

        Raises:
            InvalidRequest: there is none, or it is empty, too long, or not of the vocabulary.
        """
        kind = body.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input", "one of prompt, prompt_token_ids and messages is required")
        token_ids: Sequence[int]
        if kind == "prompt_token_ids":
            token_ids = body.prompt_token_ids.token_ids
        else:
            most = min(sampling.truncate_prompt_tokens or self._limits.max_model_len, self._limits.max_model_len)
            if kind == "messages":
                num_tokens, token_ids = await self._encode_chat(body.messages, most)
            else:
                num_bytes = len(body.prompt.encode())
                check_prompt_bytes(kind, num_bytes, self._prompt_limits)
                num_tokens, token_ids = await self._encode(body.prompt, num_bytes, True, most)
            check_prompt_length(kind, num_tokens, sampling, self._limits)
        return check_prompt(kind, token_ids, sampling, self._limits)

    async def bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences of a request's bad words, which are checked. Raises InvalidRequest."""

        def read() -> list[list[int]]:
            return bad_word_sequences(words, lambda word: encode(word, False), self._limits.vocab_size)

        encode, num_bytes = self._tokenizer.encode, 2 * sum(len(word.encode()) for word in words)
        if num_bytes <= _INLINE_BYTES:
            return read()
        return await self._turns.run(read, num_bytes, self._tenant, self._weight)

    async def read_prediction(self, body: api.GenerateRequest) -> list[int]:
        """The tokens that the client expects; none where it says nothing.

        Raises:
            InvalidRequest: they are too many, or not of the vocabulary.
        """
        prediction = body.prediction
        match prediction.WhichOneof("content"):
            case "text":
                num_bytes = len(prediction.text.encode())
                check_prompt_bytes("prediction.text", num_bytes, self._prompt_limits)
                most = self._limits.max_model_len
                num_tokens, token_ids = await self._encode(prediction.text, num_bytes, False, most)
                check_prediction_length("prediction.text", num_tokens, self._limits)
                return token_ids
            case "token_ids":
                return check_prediction("prediction.token_ids", prediction.token_ids.token_ids, self._limits)
            case _:
                return []

    async def convert(
        self, field: str, text: str, add_special_tokens: bool, answer: Callable[[list[int]], bytes]
    ) -> bytes:
        """What `answer` makes of a text's token ids, in the same turn and thread as these.

        Raises:
            InvalidRequest: the text is empty or too long.
        """
        num_bytes = len(text.encode())
        check_prompt_bytes(field, num_bytes, self._limits)
        if num_bytes <= _INLINE_BYTES:
            return answer(self._tokenizer.encode(text, add_special_tokens))

        def work() -> bytes:
            return answer(self._tokenizer.encode_aside(text, add_special_tokens, sys.maxsize)[1])

        return await self._turns.run(work, num_bytes, self._tenant, self._weight)

    async def convert_chat(
        self, messages: api.ChatMessages, add_special_tokens: bool, answer: Callable[[list[int]], bytes]
    ) -> bytes:
        """As `convert`, of a conversation. Raises InvalidRequest."""
        if self._is_short(messages):
            return await self.convert("messages", self._render(messages), add_special_tokens, answer)

        def work() -> bytes:
            text = self._render(messages)
            return answer(self._tokenizer.encode_aside(text, add_special_tokens, sys.maxsize)[1])

        return await self._turns.run(work, messages.ByteSize(), self._tenant, self._weight)

    async def _encode(self, text: str, num_bytes: int, add_special_tokens: bool, most: int) -> tuple[int, list[int]]:
        if num_bytes <= _INLINE_BYTES:
            token_ids = self._tokenizer.encode(text, add_special_tokens)
            return len(token_ids), token_ids
        return await self._turns.run(
            lambda: self._tokenizer.encode_aside(text, add_special_tokens, most), num_bytes, self._tenant, self._weight
        )

    async def _encode_chat(self, messages: api.ChatMessages, most: int) -> tuple[int, list[int]]:
        """As `_encode`, of a conversation, whose template has the special tokens."""
        if self._is_short(messages):
            text = self._render(messages)
            return await self._encode(text, len(text.encode()), False, most)
        return await self._turns.run(
            lambda: self._tokenizer.encode_aside(self._render(messages), False, most),
            messages.ByteSize(),
            self._tenant,
            self._weight,
        )

    def _is_short(self, messages: api.ChatMessages) -> bool:
        """Whether rendering takes no longer than may be done at once. Raises InvalidRequest for what may not be."""
        if messages.chat_template:
            check_request_template(messages.chat_template, self._limits.trusts_chat_templates)
        check_num_messages(len(messages.messages), self._limits)
        num_bytes = messages.ByteSize()
        if num_bytes > self._limits.max_prompt_bytes:
            own = [len(m.content.encode()) + len(m.fields_json.encode()) for m in messages.messages]
            texts = (messages.tools_json, messages.template_variables_json, messages.documents_json)
            check_prompt_bytes("messages", sum(own) + sum(len(text.encode()) for text in texts), self._limits)
        if messages.chat_template:
            return False  # nobody knows what it takes, and it may have to be compiled
        return num_bytes <= _INLINE_BYTES and len(messages.messages) <= _INLINE_MESSAGES

    def _render(self, messages: api.ChatMessages) -> str:
        """The text of a conversation; not empty."""
        template = self._tokenizer.chat_template(messages.chat_template)
        conversation = read_conversation(messages, template.reserved_variables)
        text = template.render(conversation, self._prompt_limits.max_prompt_bytes)
        if not text:
            raise InvalidRequest("messages", "must not be empty once it is rendered")
        return text
