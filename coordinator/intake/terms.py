"""On what terms a request is decoded: its longest output, and the sizes of the messages that carry it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specdec.coordinator.intake.prompt import Texts
from specdec.coordinator.intake.validation import CheckedSampling, Limits
from specdec.coordinator.sessions.prompt_logprobs import MOST_JOINED_BYTES
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import opening_bytes, position_bytes, tokens_bytes

_Parts = Literal["logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids", "constraint"]
_RESUME_CHOICE_BYTES = 32
"""What a ResumeChoice has besides its tokens."""
_RESUME_BYTES = 4096 + 512
"""What taking a request up adds besides: resume token, request id, seed."""
_OTHER_BYTES = 8 * 1024
"""What a request has beside its input, prediction and sampling parameters, and more."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Lengths and sizes that prompt and parameters lead to."""

    max_tokens: int
    """Of each choice's output."""
    num_open_bytes: int
    """Of the message that opens a session, with all tokens."""
    num_prompt_logprobs_bytes: int
    """Of the prompt's log-probabilities; 0: not asked for."""


def settle_terms(
    body: api.GenerateRequest,
    sampling: CheckedSampling,
    texts: Texts,
    limits: Limits,
    *,
    most_open_bytes: int | None,
    max_message_bytes: int,
) -> Terms:
    """The terms of a request whose fields and texts are in order.

    Args:
        body: the request.
        sampling: its parameters, with all token ids.
        texts: its prompt and prediction.
        limits: what the caller may ask for.
        most_open_bytes: what targets take; None: unknown.
        max_message_bytes: what is taken from clients.

    Raises:
        InvalidRequest: no target could take the session's opening, or no coordinator the request that resumes it.
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
    _check_opening(field, num_open_bytes, sampling, most_open_bytes)
    _check_resumable(body, field, sampling.n, max_tokens, limits.vocab_size, max_message_bytes)
    num_top = sampling.prompt_logprobs
    return Terms(max_tokens, num_open_bytes, 0 if num_top is None else num_prompt * position_bytes(num_top))


def resolve_max_tokens(sampling: CheckedSampling, num_prompt_tokens: int, limits: Limits) -> int:
    """Most output tokens: what the context leaves and the caller may have, or the fewer that were asked for.

    Raises:
        InvalidRequest: more were asked for, where that is refused.
    """
    room = limits.max_model_len - num_prompt_tokens
    most = min(room, limits.max_tokens)
    wanted = most if sampling.max_tokens is None else sampling.max_tokens
    if wanted <= most or not limits.refuses_excess_tokens:
        return min(wanted, most)
    context = f"this model's maximum context length is {limits.max_model_len} tokens, and the prompt has"
    bound = f"{context} {num_prompt_tokens}" if most == room else f"the limit is {most}"
    raise InvalidRequest("sampling.max_tokens", f"{wanted} output tokens are too many: {bound}")


def check_prompt_logprobs(body: api.GenerateRequest, num_prompt_tokens: int, terms: Terms) -> None:
    """Raises InvalidRequest where the prompt's log-probabilities fit into no message and the client takes one only."""
    if terms.num_prompt_logprobs_bytes > MOST_JOINED_BYTES and not body.prompt_logprobs_in_parts:
        message = f"of {num_prompt_tokens} tokens do not fit into one message: set prompt_logprobs_in_parts"
        raise InvalidRequest("sampling.prompt_logprobs", message)


def _check_opening(field: str, num_bytes: int, sampling: CheckedSampling, most_bytes: int | None) -> None:
    """Raises InvalidRequest where no target takes a message that opens a session of the request.

    Args:
        field: that of the prompt.
        num_bytes: what the message may come to, with all tokens.
        sampling: what of it is not tokens.
        most_bytes: what targets take; None: unknown.
    """
    if most_bytes is None or num_bytes <= most_bytes:
        return
    is_sampling = sampling.token_sampling.ByteSize() > num_bytes // 2
    raise InvalidRequest(
        _largest_field(sampling.token_sampling) if is_sampling else field,
        f"with its tokens and parameters the request takes {num_bytes} bytes, targets take {most_bytes}",
    )


def _largest_field(sampling: pb.TokenSampling) -> str:
    def num_bytes(name: _Parts) -> int:
        alone = pb.TokenSampling()
        alone.CopyFrom(sampling)
        alone.ClearField(name)
        return sampling.ByteSize() - alone.ByteSize()

    return f"sampling.{max(get_args(_Parts), key=num_bytes)}"


def _check_resumable(
    body: api.GenerateRequest, field: str, n: int, max_tokens: int, vocab_size: int, max_message_bytes: int
) -> None:
    """Raises InvalidRequest where the request that takes this one up, with all its output, would be too large.

    Args:
        body: the request.
        field: that of the prompt.
        n: number of choices.
        max_tokens: of each choice.
        vocab_size: of the model.
        max_message_bytes: what is taken from clients.
    """
    if body.HasField("resume"):
        return
    num_held_bytes = n * (tokens_bytes(max_tokens, vocab_size) + _RESUME_CHOICE_BYTES)
    num_bytes = body.ByteSize() + num_held_bytes + _RESUME_BYTES
    if num_bytes > max_message_bytes:
        raise InvalidRequest(
            "sampling.max_tokens" if 2 * num_held_bytes > num_bytes else field,
            f"to take it up again may take {num_bytes} bytes, with all output; the limit is {max_message_bytes}",
        )


def _output_room(
    body: api.GenerateRequest, num_open_bytes: int, n: int, most_open_bytes: int | None, max_message_bytes: int
) -> int:
    """How many bytes of output tokens a choice may have so that messages carry the request with all of its output.

    The same for a request and for the one that takes it up.

    Args:
        body: the request.
        num_open_bytes: what a message that opens a session of it takes without output.
        n: number of choices.
        most_open_bytes: what targets take; None: unknown.
        max_message_bytes: what is taken from clients.
    """
    sampling = api.SamplingParams()
    sampling.CopyFrom(body.sampling)
    sampling.ClearField("seed")  # which a request may leave open, and the one that takes it up may not
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
