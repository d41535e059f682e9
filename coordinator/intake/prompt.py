"""From what a client sent to the prompt's token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.intake.validation import CheckedSampling, Limits, check_num_messages, check_prompt, check_prompt_bytes
from coordinator.text.tokenizer import TextTokenizer
from specdec.rpc.errors import InvalidRequest
from specdec.v1 import coordinator_pb2 as api

_INLINE_BYTES = 8192
"""More would hold up the other streams of this event loop; for less, a thread costs more than it saves."""


class PromptReader:
    """Reads prompts of all three kinds. Long texts are tokenised in a thread, so that other streams go on."""

    def __init__(self, tokenizer: TextTokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

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
        elif kind == "messages":
            token_ids = await self.encode("messages", self.render(body.messages), add_special_tokens=False)
        else:
            token_ids = await self.encode("prompt", body.prompt, add_special_tokens=True)
        return check_prompt(kind, token_ids, sampling, self._limits)

    def render(self, messages: api.ChatMessages) -> str:
        """The text of a conversation."""
        check_num_messages(len(messages.messages), self._limits)
        num_bytes = sum(len(m.content.encode()) for m in messages.messages)
        if num_bytes > self._limits.max_prompt_bytes:
            check_prompt_bytes("messages", num_bytes, self._limits)
        return self._tokenizer.render_chat([(m.role, m.content) for m in messages.messages])

    async def encode(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        num_bytes = len(text.encode())
        check_prompt_bytes(field, num_bytes, self._limits)
        if num_bytes <= _INLINE_BYTES:
            return self._tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode_aside, text, add_special_tokens)
