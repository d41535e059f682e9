"""Output of a conversation that is shortened where it does not fit the model's context (truncation: auto)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from specdec.gateway.parts import Parts
from specdec.gateway.routes.output import Translate, output
from specdec.gateway.upstream.caller import CallerStub
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest

T = TypeVar("T")
_LEAST_INPUT_PER_OUTPUT = 4
"""Tokens of the context per token that a shortened conversation leaves for the output, at least."""


async def shortened_output(
    parts: Parts, caller: CallerStub, body: api.GenerateRequest, translate: Translate[T]
) -> AsyncGenerator[T, None]:
    """As `output`. If the conversation is too long, its oldest messages are left out, as few as possible.

    Raises SpecdecError, also if the last turn alone is too long.
    """
    try:
        async with aclosing(output(parts, caller, body, translate)) as whole:
            async for told in whole:
                yield told
        return
    except InvalidRequest as error:
        # It is found before anything is said.
        if error.reason != CONTEXT_LENGTH_EXCEEDED or not await _shorten(caller, body):
            raise
    async with aclosing(output(parts, caller, body, translate)) as rest:
        async for told in rest:
            yield told


async def _shorten(caller: CallerStub, body: api.GenerateRequest) -> bool:
    """Leave out messages until the rest fits; False: it never does, and the body is as it was."""
    info = await caller.call("GetModelInfo", api.GetModelInfoRequest())
    most_output = max(1, info.max_model_len // _LEAST_INPUT_PER_OUTPUT)
    wanted = body.sampling.max_tokens if body.sampling.HasField("max_tokens") else most_output
    most_tokens = info.max_model_len - min(wanted, most_output)
    messages = list(body.messages.messages)
    shorter = [[messages[index] for index in kept] for kept in kept_messages([each.role for each in messages])]
    asked = api.TokenizeRequest(model=body.model, messages=body.messages)
    low, high = 0, len(shorter)
    while low < high:
        middle = (low + high) // 2
        _put(asked.messages, shorter[middle])
        is_short = await _num_tokens(caller, asked) <= most_tokens
        low, high = (low, middle) if is_short else (middle + 1, high)
    if low == len(shorter):
        return False
    _put(body.messages, shorter[low])
    return True


async def _num_tokens(caller: CallerStub, asked: api.TokenizeRequest) -> float:
    try:
        answer = await caller.call("Tokenize", asked)
    except InvalidRequest as error:
        if error.reason != CONTEXT_LENGTH_EXCEEDED:
            raise
        return float("inf")
    return len(answer.token_ids)


def _put(chat: api.ChatMessages, messages: Sequence[api.ChatMessage]) -> None:
    """Replace the messages, also by some of themselves."""
    kept = api.ChatMessages(messages=messages)
    del chat.messages[:]
    chat.messages.extend(kept.messages)


def kept_messages(roles: Sequence[str]) -> list[list[int]]:
    """Indexes of the messages that are kept, from most to fewest.

    What the system says at the beginning stays. First whole turns are left out, each from a message of the user to the
    next. Of the last turn the user's message stays, and the oldest answers with their calls' results are left out.
    """
    num = len(roles)
    first = next((index for index, role in enumerate(roles) if role != "system"), num)
    head, asked = list(range(first)), [index for index in range(first, num) if roles[index] == "user"]
    begins = [index for index in asked if index > first and roles[index - 1] != "user"]
    last = begins[-1] if begins else first
    answers = [index for index in range(last, num) if roles[index] == "assistant"]
    question = list(range(last, answers[0])) if answers else []
    return [
        *([*head, *range(begin, num)] for begin in begins),
        *([*head, *question, *range(answer, num)] for answer in answers[1:]),
    ]
