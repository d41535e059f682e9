"""From what a client sent to the prompt's token ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.intake.tokenizing import TokenizingTurns
from coordinator.intake.validation import (
    CheckedSampling,
    Limits,
    check_num_messages,
    check_prompt,
    check_prompt_bytes,
    check_prompt_length,
)
from coordinator.text.tokenizer import TextTokenizer
from specdec.rpc.errors import InvalidRequest
from specdec.v1 import coordinator_pb2 as api

_INLINE_BYTES = 8192
"""More would hold up the other streams of this event loop; for less, a thread costs more than it saves."""


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
            is_chat = kind == "messages"
            text = self.render(body.messages) if is_chat else body.prompt
            most = min(sampling.truncate_prompt_tokens or self._limits.max_model_len, self._limits.max_model_len)
            num_bytes = len(text.encode())
            check_prompt_bytes(kind, num_bytes, self._prompt_limits)
            num_tokens, token_ids = await self._encode(text, num_bytes, not is_chat, most)
            check_prompt_length(kind, num_tokens, sampling, self._limits)
        return check_prompt(kind, token_ids, sampling, self._limits)

    def render(self, messages: api.ChatMessages) -> str:
        """The text of a conversation."""
        check_num_messages(len(messages.messages), self._limits)
        num_bytes = sum(len(m.content.encode()) for m in messages.messages)
        if num_bytes > self._limits.max_prompt_bytes:
            check_prompt_bytes("messages", num_bytes, self._limits)
        return self._tokenizer.render_chat([(m.role, m.content) for m in messages.messages])

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

    async def _encode(self, text: str, num_bytes: int, add_special_tokens: bool, most: int) -> tuple[int, list[int]]:
        if num_bytes <= _INLINE_BYTES:
            token_ids = self._tokenizer.encode(text, add_special_tokens)
            return len(token_ids), token_ids
        return await self._turns.run(
            lambda: self._tokenizer.encode_aside(text, add_special_tokens, most), num_bytes, self._tenant, self._weight
        )
