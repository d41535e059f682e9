"""Requests that no message could carry on: told at once, before any replica sees them."""

from __future__ import annotations

from typing import Literal, get_args

from specdec.coordinator.intake.validation import CheckedSampling
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import tokens_bytes

_Parts = Literal["logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids", "constraint"]
_RESUME_CHOICE_BYTES = 32
"""What a ResumeChoice has besides its tokens."""
_RESUME_BYTES = 4096 + 512
"""What taking a request up adds besides: resume token, request id, seed."""
_OTHER_BYTES = 8 * 1024
"""What a request has beside its input, prediction and sampling parameters, and more."""


def check_opening(field: str, num_bytes: int, sampling: CheckedSampling, most_bytes: int | None) -> None:
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


def check_resumable(
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


def output_room(
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
