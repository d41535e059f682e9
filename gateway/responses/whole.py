"""The response object, which events of a whole answer carry."""

from __future__ import annotations

from typing import Any

from specdec.gateway.chat.deltas import MessageDelta
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.responses.tools import Tools
from specdec.gateway.translation.head import AnswerHead
from specdec.gateway.translation.usage import metrics_of
from specdec.v1 import coordinator_pb2 as api


class ReasoningTokens:
    """Counts the tokens of thoughts. Where these end within a chunk, its tokens' own texts tell how many they are."""

    def __init__(self) -> None:
        self.num = 0
        self._num_silent = 0
        """Tokens whose text has not come."""

    def add(self, delta: api.ChoiceDelta, told: list[MessageDelta]) -> int:
        """Take a chunk's tokens, and what was read of it; returns how many of the tokens are thoughts."""
        if not any(piece.reasoning for piece in told):
            self._num_silent = 0 if told else self._num_silent + len(delta.tokens)
            return 0
        num_left, num = len(delta.text) - sum(map(_num_other, told)), 0
        for token in delta.tokens:
            num_left -= len(token.text)
            if num_left < 0:
                break
            num += 1
        self.num += self._num_silent + num
        self._num_silent = 0
        return num


def _num_other(piece: MessageDelta) -> int:
    call = piece.tool_call
    return len(piece.content) + (0 if call is None else len(call.name) + len(call.arguments))


def response_told(
    request: ResponsesRequest,
    tools: Tools,
    head: AnswerHead,
    status: str,
    output: list[dict[str, Any]],
    error: dict[str, Any] | None,
) -> dict[str, Any]:
    """The response, without what its end tells."""
    reasoning, text = request.reasoning, request.text
    wanted = None if text is None else text.format
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_s,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": head.model,
        "output": [*output],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "system_fingerprint": head.fingerprint,
        "temperature": request.temperature,
        "text": {
            "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True),
            **({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
        },
        "tool_choice": request.tool_choice or "auto",
        "tools": tools.taken,
        "top_logprobs": request.num_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "metrics": None,
        "user": request.user,
    }


def end_told(finished: api.GenerateFinished, num_reasoning: int) -> dict[str, Any]:
    """What the end of a response tells."""
    usage = finished.usage
    return {
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "metrics": metrics_of([finished.stats]),
    }
