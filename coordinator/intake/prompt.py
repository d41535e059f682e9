"""From a client's texts to token ids. Every refusal is an InvalidRequest that names the field."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from specdec.coordinator.intake.conversation import read_conversation
from specdec.coordinator.intake.prompt_length import (
    check_num_messages,
    check_prompt_bytes,
    check_prompt_length,
    context_exceeded,
)
from specdec.coordinator.intake.text_limits import TokenizingTurns
from specdec.coordinator.intake.validation import CheckedSampling, Limits, check_vocabulary
from specdec.coordinator.tasks import let_others_run
from specdec.coordinator.text.bad_words import bad_word_sequences
from specdec.coordinator.text.chat_template import RenderedTooLong
from specdec.coordinator.text.request_templates import check_request_template
from specdec.coordinator.text.tokenizer import TextTokenizer
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

_INLINE_BYTES = 8192
"""Bytes tokenized in the event loop: more would hold up the other streams, and for less a thread costs too much."""
_INLINE_MESSAGES = 64
"""Messages rendered in the event loop: even empty ones cost a template time."""
_MOST_MARKER_CHARS = 128
_MOST_BEHIND = 3
"""Layout tokens that a template may put between an empty think section and the answer."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A request's texts as token ids."""

    prompt: list[int]
    """Truncated if the client asked for it."""
    prediction: list[int]
    """Expected output."""
    is_thinking: bool | None = None
    """Whether the rendered prompt ends within a think section; None: unknown."""


class PromptReader:
    """Reads one caller's prompts: text, token ids or messages. Long texts wait for their tenant's turn in a thread."""

    def __init__(
        self, tokenizer: TextTokenizer, limits: Limits, turns: TokenizingTurns, tenant: str = "", weight: float = 1.0
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        # A text of more bytes cannot fit, even if the client wants only its end.
        most_bytes = min(limits.max_prompt_bytes, limits.max_model_len * tokenizer.longest_token_bytes)
        self._prompt_limits = replace(limits, max_prompt_bytes=most_bytes)
        self._turns = turns
        self._tenant = tenant
        self._weight = weight
        self._think_markers = api.ThinkMarkers()
        self._is_thinking: bool | None = None

    async def tokenize(self, body: api.GenerateRequest, sampling: CheckedSampling) -> Texts:
        """All texts of a request as tokens: bad words and the start of the constraint go into `sampling`.

        Raises:
            InvalidRequest: names the first bad text, in the order prompt, bad words, prediction, constraint.
        """
        self._think_markers = _checked_markers(body)
        prompt = await self.read(body, sampling)
        for sequence in await self.bad_words(body.sampling.bad_words):
            sampling.token_sampling.bad_words.add(token_ids=sequence)
        prediction = await self.read_prediction(body)
        if sampling.token_sampling.HasField("constraint"):
            resolve_start(sampling.token_sampling.constraint, prompt, self._tokenizer, self._is_thinking)
        return Texts(prompt, prediction, self._is_thinking)

    async def read(self, body: api.GenerateRequest, sampling: CheckedSampling) -> list[int]:
        """The prompt, checked and truncated.

        Raises:
            InvalidRequest: the prompt is missing, empty, too long, or has ids outside the vocabulary.
        """
        kind = body.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("input", "one of prompt, prompt_token_ids and messages is required")
        token_ids: Sequence[int]
        if kind == "prompt_token_ids":
            check_prompt_length(kind, len(body.prompt_token_ids.token_ids), sampling, self._limits)
            token_ids = body.prompt_token_ids.token_ids[:]  # as a list
            await let_others_run(len(token_ids))
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
        """Check a request's bad words; returns their token sequences. Raises InvalidRequest."""

        def read() -> list[list[int]]:
            return bad_word_sequences(words, lambda word: encode(word, False), self._limits.vocab_size)

        encode, num_bytes = self._tokenizer.encode, 2 * sum(len(word.encode()) for word in words)
        if num_bytes <= _INLINE_BYTES:
            return read()
        return await self._turns.run_in_turn(read, num_bytes, self._tenant, self._weight)

    async def read_prediction(self, body: api.GenerateRequest) -> list[int]:
        """The tokens that the client expects; empty if it sent no prediction.

        Raises:
            InvalidRequest: the prediction is too long, or has ids outside the vocabulary.
        """
        prediction = body.prediction
        match prediction.WhichOneof("content"):
            case "text":
                num_bytes = len(prediction.text.encode())
                most = self._limits.max_model_len
                if num_bytes > self._prompt_limits.max_prompt_bytes:
                    _refuse_prediction("prediction.text", f"{num_bytes} bytes", self._limits)
                num_tokens, token_ids = await self._encode(prediction.text, num_bytes, False, most)
                _check_prediction_length("prediction.text", num_tokens, self._limits)
                return token_ids
            case "token_ids":
                _check_prediction_length("prediction.token_ids", len(prediction.token_ids.token_ids), self._limits)
                token_ids = prediction.token_ids.token_ids[:]
                await let_others_run(len(token_ids))
                return check_prediction("prediction.token_ids", token_ids, self._limits)
            case _:
                return []

    async def convert(
        self, field: str, text: str, add_special_tokens: bool, answer: Callable[[list[int]], bytes]
    ) -> bytes:
        """Apply `answer` to a text's token ids, in the turn and thread of the tokenization.

        Raises:
            InvalidRequest: the text is empty or too long.
        """
        num_bytes = len(text.encode())
        check_prompt_bytes(field, num_bytes, self._limits)
        if num_bytes <= _INLINE_BYTES:
            return answer(self._tokenizer.encode(text, add_special_tokens))

        def work() -> bytes:
            return answer(self._tokenizer.encode_aside(text, add_special_tokens, sys.maxsize)[1])

        return await self._turns.run_in_turn(work, num_bytes, self._tenant, self._weight)

    async def convert_chat(
        self, messages: api.ChatMessages, add_special_tokens: bool, answer: Callable[[list[int]], bytes]
    ) -> bytes:
        """`convert` for a conversation. Raises InvalidRequest."""
        if self._is_short(messages):
            return await self.convert("messages", self._render(messages), add_special_tokens, answer)

        def work() -> bytes:
            text = self._render(messages)
            return answer(self._tokenizer.encode_aside(text, add_special_tokens, sys.maxsize)[1])

        return await self._turns.run_in_turn(work, messages.ByteSize(), self._tenant, self._weight)

    async def _encode(self, text: str, num_bytes: int, add_special_tokens: bool, most: int) -> tuple[int, list[int]]:
        if num_bytes <= _INLINE_BYTES:
            token_ids = self._tokenizer.encode(text, add_special_tokens)
            return len(token_ids), token_ids
        return await self._turns.run_in_turn(
            lambda: self._tokenizer.encode_aside(text, add_special_tokens, most), num_bytes, self._tenant, self._weight
        )

    async def _encode_chat(self, messages: api.ChatMessages, most: int) -> tuple[int, list[int]]:
        """`_encode` for a conversation, whose template adds the special tokens."""
        if self._is_short(messages):
            text = self._render(messages)
            return await self._encode(text, len(text.encode()), False, most)
        return await self._turns.run_in_turn(
            lambda: self._tokenizer.encode_aside(self._render(messages), False, most),
            messages.ByteSize(),
            self._tenant,
            self._weight,
        )

    def _is_short(self, messages: api.ChatMessages) -> bool:
        """Whether rendering may be done in the event loop. Raises InvalidRequest if it may not be done at all."""
        if messages.chat_template:
            check_request_template(messages.chat_template, self._limits.trusts_chat_templates)
        check_num_messages(len(messages.messages), self._limits)
        num_bytes = messages.ByteSize()
        if num_bytes > self._limits.max_prompt_bytes:
            own = [len(m.content.encode()) + len(m.fields_json.encode()) for m in messages.messages]
            texts = (messages.tools_json, messages.template_variables_json, messages.documents_json)
            check_prompt_bytes("messages", sum(own) + sum(len(text.encode()) for text in texts), self._limits)
        if messages.chat_template:
            return False  # its cost is unknown, and it may have to be compiled
        return num_bytes <= _INLINE_BYTES and len(messages.messages) <= _INLINE_MESSAGES

    def _render(self, messages: api.ChatMessages) -> str:
        """The text of a conversation; not empty."""
        template = self._tokenizer.chat_template(messages.chat_template)
        conversation = read_conversation(messages, template.reserved_variables)
        try:
            text = template.render(conversation, self._prompt_limits.max_prompt_bytes)
        except RenderedTooLong as error:
            raise context_exceeded("messages", str(error), self._limits) from None
        if not text:
            raise InvalidRequest("messages", "must not be empty once it is rendered")
        if (markers := self._think_markers).start:
            self._is_thinking = _ends_in_thoughts(text, markers, messages.continue_final_message)
        return text


def resolve_start(
    constraint: pb.Constraint, prompt: Sequence[int], tokenizer: TextTokenizer, is_thinking: bool | None = None
) -> None:
    """Replace the constraint's start texts by token ids, or by nothing if the prompt ends behind the start.

    Args:
        constraint: changed.
        prompt: its token ids.
        tokenizer: the model's.
        is_thinking: whether the prompt ends in the text before the constraint; None: its last tokens tell.

    Raises:
        InvalidRequest: the text after which the constraint begins is not one token.
    """
    text, opening = constraint.after_token, constraint.opening_token
    constraint.after_token = constraint.opening_token = ""
    if not text:
        return
    token_id, opening_id = tokenizer.token_id(text), tokenizer.token_id(opening) if opening else None
    if token_id is None:
        message = f"{text[:100]!r} is not one token of the model: name a token of its vocabulary"
        raise InvalidRequest("sampling.constraint.after_token", message)
    markers = [token for token in prompt[-1 - _MOST_BEHIND :] if token in (token_id, opening_id)]
    if is_thinking is None:
        is_thinking = bool(markers) and markers[-1] == opening_id
    if not is_thinking and markers and markers[-1] == token_id:
        return
    constraint.after_token_id = token_id
    if not is_thinking and opening_id is not None:
        constraint.opening_token_id = opening_id


def _checked_markers(body: api.GenerateRequest) -> api.ThinkMarkers:
    """The request's think markers; empty ones if it has none. Raises InvalidRequest."""
    markers = body.think_markers
    if body.HasField("think_markers") and not (
        0 < len(markers.start) <= _MOST_MARKER_CHARS and 0 < len(markers.end) <= _MOST_MARKER_CHARS
    ):
        raise InvalidRequest("think_markers", f"start and end must have 1 to {_MOST_MARKER_CHARS} characters")
    return markers


def _ends_in_thoughts(text: str, markers: api.ThinkMarkers, is_continued: bool) -> bool:
    """Whether a rendered prompt ends within a think section: its template opened one, or the continued message did."""
    if is_continued:
        return text.rfind(markers.start) > text.rfind(markers.end)
    return text.rstrip().endswith(markers.start)


def _check_prediction_length(field: str, num_tokens: int, limits: Limits) -> None:
    """Refuse a prediction longer than a context. Raises InvalidRequest."""
    if num_tokens > limits.max_model_len:
        _refuse_prediction(field, f"{num_tokens} tokens", limits)


def _refuse_prediction(field: str, size: str, limits: Limits) -> NoReturn:
    raise InvalidRequest(field, f"{size} are more than a context of {limits.max_model_len} tokens holds")


def check_prediction(field: str, token_ids: list[int], limits: Limits) -> list[int]:
    """Check predicted token ids: of the vocabulary, and no more than a context holds. Raises InvalidRequest."""
    _check_prediction_length(field, len(token_ids), limits)
    check_vocabulary(f"{field}.token_ids", token_ids, limits)
    return token_ids


def check_prompt(field: str, token_ids: Sequence[int], sampling: CheckedSampling, limits: Limits) -> list[int]:
    """Check a prompt's token ids; returns them, truncated if the client asked for it. Raises InvalidRequest."""
    # Lengths first: a look at millions of ids would hold up other streams.
    num_cut = len(token_ids) - check_prompt_length(field, len(token_ids), sampling, limits)
    kept = [*token_ids[num_cut:]]
    if max(kept) >= limits.vocab_size:
        index = next(i for i, token in enumerate(kept) if token >= limits.vocab_size)
        raise InvalidRequest(
            f"{field}.token_ids[{num_cut + index}]" if field == "prompt_token_ids" else field,
            f"token id {kept[index]} is outside the vocabulary of {limits.vocab_size}",
        )
    return kept
