"""How long a prompt may be. A refusal has the reason by which clients know that they must shorten it."""

from __future__ import annotations

from specdec.coordinator.intake.validation import CheckedSampling, Limits
from specdec.wire.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest


def context_exceeded(field: str, problem: str, limits: Limits) -> InvalidRequest:
    """The refusal of a prompt that is too long, in the words that clients look for."""
    context = f"this model's maximum context length is {limits.max_model_len} tokens"
    return InvalidRequest(field, f"{context}, but {problem}: shorten the prompt", reason=CONTEXT_LENGTH_EXCEEDED)


def check_prompt_bytes(field: str, num_bytes: int, limits: Limits) -> None:
    """Refuse empty or too long text before it is tokenized. Raises InvalidRequest."""
    if num_bytes == 0:
        raise InvalidRequest(field, "must not be empty")
    if num_bytes > limits.max_prompt_bytes:
        raise context_exceeded(field, f"{num_bytes} bytes exceed the limit of {limits.max_prompt_bytes}", limits)


def check_num_messages(num_messages: int, limits: Limits) -> None:
    """Refuse more messages than a context has tokens: each takes one at least. Raises InvalidRequest."""
    if num_messages > limits.max_model_len:
        raise context_exceeded("messages.messages", f"{num_messages} messages have more", limits)


def check_prompt_length(field: str, num_tokens: int, sampling: CheckedSampling, limits: Limits) -> int:
    """Tokens of a prompt left after truncation. Raises InvalidRequest if none or too many are left."""
    if not num_tokens:
        raise InvalidRequest(field, "must not be empty")
    num_kept = min(num_tokens, sampling.truncate_prompt_tokens or num_tokens)
    if limits.max_prompt_tokens is not None and num_kept > limits.max_prompt_tokens:
        most = f"{num_kept} tokens exceed the limit of {limits.max_prompt_tokens} for this caller's prompts"
        raise context_exceeded(field, most, limits)
    if num_kept >= limits.max_model_len:
        raise context_exceeded(field, f"{num_kept} tokens leave no room for output", limits)
    return num_kept
