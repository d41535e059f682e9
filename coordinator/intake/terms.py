"""A request's longest output, and the sizes of the messages that carry it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specdec.coordinator.intake.prompt import Texts
from specdec.coordinator.intake.prompt_length import context_exceeded
from specdec.coordinator.intake.validation import CheckedSampling, Limits
from specdec.coordinator.sessions.prompt_logprobs import MOST_JOINED_BYTES
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest
from specdec.wire.message_sizes import opening_bytes, position_bytes, tokens_bytes

_Parts = Literal["logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids", "constraint"]
_RESUME_CHOICE_BYTES = 32
"""Bytes of a ResumeChoice without its tokens."""
_RESUME_BYTES = 4096 + 512
"""Bytes that resuming adds to a request without the choices: resume token, request id, seed."""
_OTHER_BYTES = 8 * 1024
"""Bytes, generously, of a request without its input, prediction and sampling parameters."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Lengths and sizes that follow from prompt and parameters."""

    max_tokens: int
    """Output limit of each choice."""
    num_open_bytes: int
    """Size of the message that opens a session with all its tokens."""
    num_prompt_logprobs_bytes: int
    """Size of the prompt's log-probabilities; 0 if the client wants none."""


def settle_terms(
    body: api.GenerateRequest,
    sampling: CheckedSampling,
    texts: Texts,
    limits: Limits,
    *,
    most_open_bytes: int | None,
    max_message_bytes: int,
) -> Terms:
    """The terms of a request whose fields and texts are checked.

    Args:
        body: the request.
        sampling: its parameters, with all token ids.
        texts: its prompt and prediction.
        limits: the caller's limits.
        most_open_bytes: the targets' message limit; None: unknown.
        max_message_bytes: this coordinator's message limit.

    Raises:
        InvalidRequest: the message that opens the session, or the request that resumes it, would be too large.
    """
    num_prompt, num_prediction = len(texts.prompt), len(texts.prediction)
    max_tokens = resolve_max_tokens(sampling, num_prompt, limits)
    num_open_bytes = opening_bytes(num_prompt, limits.vocab_size, sampling.token_sampling.ByteSize())
    num_open_bytes += tokens_bytes(num_prediction, limits.vocab_size)
    if sampling.max_tokens is None:
        room = _output_room(body, num_open_bytes, sampling.n, most_open_bytes, max_message_bytes)
        max_tokens = min(max_tokens, max(1, room // tokens_bytes(1, limits.vocab_size)))
    num_open_bytes += tokens_bytes(max_tokens, limits.vocab_size)
    field = str(body.WhichOneof("input"))
    _check_opening(field, num_open_bytes, sampling, most_open_bytes, limits)
    _check_resumable(body, field, sampling.n, max_tokens, limits, max_message_bytes)
    num_top = sampling.prompt_logprobs
    return Terms(max_tokens, num_open_bytes, 0 if num_top is None else num_prompt * position_bytes(num_top))


def resolve_max_tokens(sampling: CheckedSampling, num_prompt_tokens: int, limits: Limits) -> int:
    """The output limit: what the context leaves and the caller may have, or fewer tokens if the client asks for fewer.

    Raises:
        InvalidRequest: the client asks for more, and `limits.refuses_excess_tokens` is set.
    """
    room = limits.max_model_len - num_prompt_tokens
    most = min(room, limits.max_tokens)
    if sampling.max_tokens is None:
        return min(most, limits.defaults.max_new_tokens or most)
    wanted = sampling.max_tokens
    if wanted <= most or not limits.refuses_excess_tokens:
        return min(wanted, most)
    context = f"this model's maximum context length is {limits.max_model_len} tokens, and the prompt has"
    bound = f"{context} {num_prompt_tokens}" if most == room else f"the limit is {most}"
    reason = CONTEXT_LENGTH_EXCEEDED if most == room else None
    raise InvalidRequest("sampling.max_tokens", f"{wanted} output tokens are too many: {bound}", reason=reason)


def check_prompt_logprobs(body: api.GenerateRequest, num_prompt_tokens: int, terms: Terms) -> None:
    """Raise InvalidRequest if the prompt's log-probabilities exceed the one message that the client accepts."""
    if terms.num_prompt_logprobs_bytes > MOST_JOINED_BYTES and not body.prompt_logprobs_in_parts:
        message = f"log-probabilities of {num_prompt_tokens} tokens exceed one message: set prompt_logprobs_in_parts"
        raise InvalidRequest("sampling.prompt_logprobs", message)


def _check_opening(
    field: str, num_bytes: int, sampling: CheckedSampling, most_bytes: int | None, limits: Limits
) -> None:
    """Raise InvalidRequest if a message that opens a session is larger than the targets' limit.

    Args:
        field: name of the field with the prompt.
        num_bytes: size of the message, with all tokens.
        sampling: the message's part that is not tokens.
        most_bytes: the targets' message limit; None: unknown.
        limits: the caller's limits.
    """
    if most_bytes is None or num_bytes <= most_bytes:
        return
    problem = f"tokens and parameters of the request have {num_bytes} bytes; the targets' limit is {most_bytes}"
    if sampling.token_sampling.ByteSize() > num_bytes // 2:
        raise InvalidRequest(_largest_field(sampling.token_sampling), problem)
    raise context_exceeded(field, problem, limits)


def _largest_field(sampling: pb.TokenSampling) -> str:
    def num_bytes(name: _Parts) -> int:
        alone = pb.TokenSampling()
        alone.CopyFrom(sampling)
        alone.ClearField(name)
        return sampling.ByteSize() - alone.ByteSize()

    return f"sampling.{max(get_args(_Parts), key=num_bytes)}"


def _check_resumable(
    body: api.GenerateRequest, field: str, n: int, max_tokens: int, limits: Limits, max_message_bytes: int
) -> None:
    """Raise InvalidRequest if the request that resumes this one, with all its output, would be too large.

    Args:
        body: the request.
        field: name of the field with the prompt.
        n: number of choices.
        max_tokens: output limit of each choice.
        limits: the caller's limits.
        max_message_bytes: this coordinator's message limit.
    """
    if body.HasField("resume"):
        return
    num_held_bytes = n * (tokens_bytes(max_tokens, limits.vocab_size) + _RESUME_CHOICE_BYTES)
    num_bytes = body.ByteSize() + num_held_bytes + _RESUME_BYTES
    if num_bytes > max_message_bytes:
        problem = f"resuming it with all its output would take {num_bytes} bytes; the limit is {max_message_bytes}"
        if 2 * num_held_bytes > num_bytes:
            raise InvalidRequest("sampling.max_tokens", problem)
        raise context_exceeded(field, problem, limits)


def _output_room(
    body: api.GenerateRequest, num_open_bytes: int, n: int, most_open_bytes: int | None, max_message_bytes: int
) -> int:
    """Bytes of output tokens a choice may have so that opening and resuming messages can carry them all.

    The result is equal for a request and for the one that resumes it.

    Args:
        body: the request.
        num_open_bytes: size of a session's opening message without output.
        n: number of choices.
        most_open_bytes: the targets' message limit; None: unknown.
        max_message_bytes: this coordinator's message limit.
    """
    sampling = api.SamplingParams()
    sampling.CopyFrom(body.sampling)
    sampling.ClearField("seed")  # optional at first, and required to resume
    num_told_bytes = _input_bytes(body) + body.prediction.ByteSize() + sampling.ByteSize()
    resumed = (max_message_bytes - num_told_bytes - _OTHER_BYTES) // n - _RESUME_CHOICE_BYTES
    return resumed if most_open_bytes is None else min(resumed, most_open_bytes - num_open_bytes)


def _input_bytes(body: api.GenerateRequest) -> int:
    match body.WhichOneof("input"):
        case "prompt":
            return len(body.prompt.encode())
        case "messages":
            return body.messages.ByteSize()
        case _:
            return body.prompt_token_ids.ByteSize()
