"""Check an OpenSession, and convert its sampling parameters to the engine's."""

from __future__ import annotations

from collections.abc import Collection

from google.rpc import code_pb2

from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_limits import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    leaves_no_token,
)
from specdec.wire.sampling_params import RejectionMethod, SamplingParams, VerifyMode

_VERIFY_MODES = {pb.VERIFY_MODE_COUPLED: VerifyMode.COUPLED, pb.VERIFY_MODE_REJECTION: VerifyMode.REJECTION}
_REJECTION_METHODS = {
    pb.REJECTION_SAMPLE_METHOD_STANDARD: RejectionMethod.STANDARD,
    pb.REJECTION_SAMPLE_METHOD_BLOCK: RejectionMethod.BLOCK,
}

_MOST_DRAFTERS = 64
"""Drafters that a session may name; there are fewer."""


def verify_mode(body: pb.OpenSession, params: SamplingParams, default: VerifyMode) -> VerifyMode:
    """The session's mode, or the deployment's default. Draft and target must get the same one.

    Greedy decoding tests equality in both modes, so greedy sessions are coupled.
    """
    if params.is_greedy:
        return VerifyMode.COUPLED
    return _VERIFY_MODES.get(body.verify_mode, default)


def rejection_method(body: pb.OpenSession) -> RejectionMethod:
    """Rejection mode's method for chains. Older coordinators name none: token by token."""
    return _REJECTION_METHODS.get(body.rejection_sample_method, RejectionMethod.STANDARD)


def check_room(num_sessions: int, max_sessions: int) -> None:
    """Raise SessionFailure if the replica's sessions are all taken."""
    if num_sessions >= max_sessions:
        message = f"all {max_sessions} sessions (max_sessions) are taken"
        raise SessionFailure(code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS", message)


def check_open(
    body: pb.OpenSession, *, vocab_size: int, max_model_len: int, eos_token_ids: Collection[int] = ()
) -> None:
    """Check an OpenSession against the model. Coordinators are not trusted: they may have another version.

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
    if body.num_prompt_logprobs > MAX_LOGPROBS:
        raise invalid("open.num_prompt_logprobs", f"must be at most {MAX_LOGPROBS}")
    _check_sampling(body.sampling, vocab_size, eos_token_ids)


def check_prediction(body: pb.OpenSession, *, vocab_size: int, max_model_len: int) -> None:
    """Check the drafters and the prediction of an OpenSession.

    Raises:
        SessionFailure: too many names, or a prediction that cannot be output of the model; names the field.
    """
    if len(body.drafters) > _MOST_DRAFTERS:
        raise invalid("open.drafters", f"{len(body.drafters)} names exceed the limit of {_MOST_DRAFTERS}")
    prediction = body.prediction_token_ids
    if len(prediction) > max_model_len:
        raise invalid("open.prediction_token_ids", f"{len(prediction)} tokens exceed the context of {max_model_len}")
    if prediction and max(prediction) >= vocab_size:
        message = f"token id {max(prediction)} is outside the vocabulary of {vocab_size}"
        raise invalid("open.prediction_token_ids", message)


def sampling_params(body: pb.OpenSession, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """The engine's sampling parameters of a checked OpenSession.

    Under a constraint the masks replace `ignore_eos`: an end-of-sequence token that they allow ends the choice.
    """
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
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_words=tuple(tuple(sequence.token_ids) for sequence in sampling.bad_words),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos and not sampling.HasField("constraint"),
        eos_token_ids=eos_token_ids,
        seed=sampling.seed,
        choice=sampling.choice,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
    )


def _check_sampling(sampling: pb.TokenSampling, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    for name, allowed in RANGES.items():
        if (fault := allowed.fault_of(getattr(sampling, name))) is not None:
            raise invalid(f"open.sampling.{name}", fault)
    if sampling.max_tokens < 1:
        raise invalid("open.sampling.max_tokens", "must be at least 1")
    for token_id, bias in sampling.logit_bias.items():
        field = f"open.sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise invalid(field, f"outside the vocabulary of {vocab_size}")
        if (fault := LOGIT_BIAS.fault_of(bias)) is not None:
            raise invalid(field, fault)
    if sampling.num_logprobs > MAX_LOGPROBS:
        raise invalid("open.sampling.num_logprobs", f"must be at most {MAX_LOGPROBS}")
    # They are masked row by row, so each costs time in every step.
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("open.sampling.stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS} ids")
    _check_restrictions(sampling, vocab_size)
    held_back = (*sampling.stop_token_ids, *eos_token_ids)
    if leaves_no_token(vocab_size, sampling.min_tokens, held_back, sampling.allowed_token_ids):
        raise invalid("open.sampling.min_tokens", "leaves no token to sample: every allowed token is a stop token")


def _check_restrictions(sampling: pb.TokenSampling, vocab_size: int) -> None:
    if len(sampling.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
        raise invalid("open.sampling.allowed_token_ids", f"must have at most {MAX_ALLOWED_TOKEN_IDS} ids")
    if max(sampling.allowed_token_ids, default=0) >= vocab_size:
        raise invalid("open.sampling.allowed_token_ids", f"has an id outside the vocabulary of {vocab_size}")
    if len(sampling.bad_words) > 2 * MAX_BAD_WORDS:
        raise invalid("open.sampling.bad_words", f"must have at most {2 * MAX_BAD_WORDS} sequences")
    for index, sequence in enumerate(sampling.bad_words):
        field = f"open.sampling.bad_words[{index}]"
        if not 1 <= len(sequence.token_ids) <= MAX_BAD_WORD_TOKENS:
            raise invalid(field, f"must have 1 to {MAX_BAD_WORD_TOKENS} ids")
        if max(sequence.token_ids) >= vocab_size:
            raise invalid(field, f"has an id outside the vocabulary of {vocab_size}")
