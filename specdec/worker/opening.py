"""Checks an OpenSession and turns its sampling parameters into the engine's."""

from __future__ import annotations

import math

from google.rpc import code_pb2

from specdec.sampling_params import SamplingParams, VerifyMode
from specdec.v1 import common_pb2 as pb
from specdec.worker.errors import SessionFailure, invalid

_VERIFY_MODES = {pb.VERIFY_MODE_COUPLED: VerifyMode.COUPLED, pb.VERIFY_MODE_REJECTION: VerifyMode.REJECTION}


def verify_mode(body: pb.OpenSession, params: SamplingParams, default: VerifyMode) -> VerifyMode:
    """The mode a session asks for, else the deployment's. Draft and target must come to the same one.

    Greedy decoding is equality in both modes, so greedy sessions are coupled ones.
    """
    if params.is_greedy:
        return VerifyMode.COUPLED
    return _VERIFY_MODES.get(body.verify_mode, default)


def check_room(num_sessions: int, max_sessions: int) -> None:
    """Raise SessionFailure where a replica holds as many sessions as it may."""
    if num_sessions >= max_sessions:
        message = f"all {max_sessions} sessions are taken"
        raise SessionFailure(code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS", message)


def check_open(body: pb.OpenSession, *, vocab_size: int, max_model_len: int) -> None:
    """Check an OpenSession against the model.

    Raises:
        SessionFailure: a field is out of range; names it.
    """
    num_tokens = len(body.token_ids)
    if num_tokens == 0:
        raise invalid("open.token_ids", "must not be empty")
    if not 1 <= body.num_prompt_tokens <= num_tokens:
        raise invalid("open.num_prompt_tokens", f"{body.num_prompt_tokens} is not within 1..{num_tokens}")
    if num_tokens >= max_model_len:
        raise invalid("open.token_ids", f"{num_tokens} tokens leave no room in a context of {max_model_len}")
    if max(body.token_ids) >= vocab_size:
        raise invalid("open.token_ids", f"token id {max(body.token_ids)} is outside the vocabulary of {vocab_size}")
    sampling = body.sampling
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        if not math.isfinite(getattr(sampling, name)):
            raise invalid(f"open.sampling.{name}", "must be finite")
    if sampling.temperature < 0:
        raise invalid("open.sampling.temperature", "must not be negative")
    if not 0 < sampling.top_p <= 1:
        raise invalid("open.sampling.top_p", "must be in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise invalid("open.sampling.min_p", "must be in [0, 1]")
    if sampling.repetition_penalty <= 0:
        raise invalid("open.sampling.repetition_penalty", "must be positive")
    if sampling.max_tokens < 1:
        raise invalid("open.sampling.max_tokens", "must be at least 1")
    if any(token >= vocab_size for token in sampling.logit_bias):
        raise invalid("open.sampling.logit_bias", f"a token id is outside the vocabulary of {vocab_size}")


def sampling_params(body: pb.OpenSession, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """The engine's sampling parameters of a checked OpenSession."""
    sampling = body.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        eos_token_ids=eos_token_ids,
        seed=sampling.seed,
        choice=sampling.choice,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
    )
