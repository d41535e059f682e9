"""Checks of a request's fields. Every refusal is an InvalidRequest that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec.config.drafter_options import DRAFT_MODEL, DRAFTER_NAMES
from specdec.constraints.limits import fault_of
from specdec.coordinator.tenants.quotas import Allowance
from specdec.coordinator.text.bad_words import check_bad_words
from specdec.coordinator.text.choice_output import ChoiceOutput
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from specdec.wire.sampling_limits import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_CACHE_SALT_BYTES,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    leaves_no_token,
)

_MOST_COUNT = 2**32 - 1
_MAX_REQUEST_ID_BYTES = 256
"""Bytes of a request id, at most: it is part of keys in the store, and of each session's id on the wire."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the model and the deployment. Lengths are in tokens unless named otherwise."""

    vocab_size: int
    max_model_len: int
    max_tokens: int
    max_choices: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_logprobs: int
    max_logit_bias: int
    max_prompt_bytes: int
    max_prompt_tokens: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    defaults: pb.SamplingDefaults = field(default_factory=pb.SamplingDefaults)
    """Sampling parameters of requests that name none."""
    max_draft_tokens: int = 64
    knows_constraints: bool = False
    trusts_chat_templates: bool = False
    """Applies to templates in requests."""
    refuses_excess_tokens: bool = False
    """Refuse a request for more output than allowed; False: shorten its output."""

    def within(self, allowance: Allowance) -> Limits:
        """These limits, narrowed by a caller's allowance."""
        most = self.max_tokens if allowance.max_tokens is None else min(self.max_tokens, allowance.max_tokens)
        return replace(self, max_tokens=most, max_prompt_tokens=allowance.max_prompt_tokens)


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """Sampling parameters with defaults filled in, except max_tokens, which depends on the prompt's length."""

    token_sampling: pb.TokenSampling
    """`for_choice` adds seed, choice and max_tokens; `PromptReader.tokenize` adds the bad words."""
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    include_stop_in_output: bool
    skip_special_tokens: bool
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None

    def for_choice(self, choice: int, seed: int, max_tokens: int) -> pb.TokenSampling:
        """The parameters of one choice, as draft and target need them."""
        sampling = pb.TokenSampling()
        sampling.CopyFrom(self.token_sampling)
        sampling.seed, sampling.choice, sampling.max_tokens = seed, choice, max_tokens
        return sampling

    def output(self, detokenizers: DetokenizerFactory, prompt: Sequence[int]) -> ChoiceOutput:
        """The detokenizer and stop check of a new choice behind a prompt."""
        return ChoiceOutput(
            detokenizers.create(self.skip_special_tokens, prompt),
            self.stop,
            self.include_stop_in_output,
            self.token_sampling.min_tokens,
            detokenizers.special_texts if self.skip_special_tokens else {},
        )


_MOST_TIME_PER_TOKEN_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class CheckedSpeculation:
    """Speculation settings of a request."""

    enabled: bool
    verify_mode: pb.VerifyMode.ValueType
    max_draft_tokens: int | None
    time_per_token_us: int = 0
    """Wanted time; 0 if the client names none."""
    drafters: tuple[str, ...] = ()
    """Sources that may propose; empty: all."""
    rejection_method: pb.RejectionSampleMethod.ValueType = pb.REJECTION_SAMPLE_METHOD_STANDARD


def check_request_id(request_id: str) -> None:
    """Refuse a long or unprintable request id. Raises InvalidRequest."""
    if len(request_id.encode()) > _MAX_REQUEST_ID_BYTES:
        raise InvalidRequest("request_id", f"must be at most {_MAX_REQUEST_ID_BYTES} bytes")
    if not request_id.isprintable():
        raise InvalidRequest("request_id", "must be printable")


def check_cache_salt(cache_salt: str) -> None:
    """Refuse a long cache salt: it is part of a session's opening. Raises InvalidRequest."""
    if len(cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest("cache_salt", f"must be at most {MAX_CACHE_SALT_BYTES} bytes")


def check_sampling(params: api.SamplingParams, limits: Limits) -> CheckedSampling:
    """Check sampling parameters and fill in the defaults.

    Raises:
        InvalidRequest: a field is out of range; names the first.
    """
    sampling = pb.TokenSampling(
        temperature=_number(params, "temperature", limits, neutral=1.0),
        top_k=params.top_k if params.HasField("top_k") else limits.defaults.top_k,
        top_p=_number(params, "top_p", limits, neutral=1.0),
        min_p=_number(params, "min_p", limits, neutral=0.0),
        repetition_penalty=_number(params, "repetition_penalty", limits, neutral=1.0),
        presence_penalty=_number(params, "presence_penalty", limits, neutral=0.0),
        frequency_penalty=_number(params, "frequency_penalty", limits, neutral=0.0),
        logit_bias=_logit_bias(params, limits),
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
    )
    max_tokens = _count(params, "max_tokens", _MOST_COUNT, lowest=1)
    if max_tokens is not None and params.min_tokens > max_tokens:
        message = f"{params.min_tokens} exceeds max_tokens ({max_tokens})"
        raise InvalidRequest("sampling.min_tokens", message)
    if params.min_tokens > limits.max_tokens:
        raise InvalidRequest("sampling.min_tokens", f"must be at most {limits.max_tokens}")
    _check_stop_strings(params.stop, limits)
    _check_token_ids("sampling.stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS, limits)
    _check_token_ids("sampling.allowed_token_ids", params.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, limits)
    check_bad_words(params.bad_words)
    held_back = (*params.stop_token_ids, *limits.eos_token_ids)
    if leaves_no_token(limits.vocab_size, params.min_tokens, held_back, params.allowed_token_ids):
        raise InvalidRequest("sampling.min_tokens", "leaves no token to sample: every allowed token is a stop token")
    sampling.stop_token_ids.extend(params.stop_token_ids)
    sampling.allowed_token_ids.extend(params.allowed_token_ids)
    if params.HasField("constraint"):
        _check_constraint(params.constraint, limits)
        sampling.constraint.CopyFrom(params.constraint)
    n = _count(params, "n", limits.max_choices, lowest=1)
    logprobs = _count(params, "logprobs", limits.max_logprobs)
    if logprobs is not None:
        sampling.num_logprobs = logprobs
    return CheckedSampling(
        token_sampling=sampling,
        n=1 if n is None else n,
        max_tokens=max_tokens,
        stop=tuple(params.stop),
        include_stop_in_output=params.include_stop_in_output,
        skip_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        prompt_logprobs=_count(params, "prompt_logprobs", limits.max_logprobs),
        truncate_prompt_tokens=_count(params, "truncate_prompt_tokens", _MOST_COUNT, lowest=1),
    )


def check_speculation(
    params: api.SpeculationParams,
    default_mode: pb.VerifyMode.ValueType,
    limits: Limits,
    default_method: pb.RejectionSampleMethod.ValueType = pb.REJECTION_SAMPLE_METHOD_STANDARD,
) -> CheckedSpeculation:
    """Check a request's speculation parameters. max_draft_tokens 0 disables speculation. Raises InvalidRequest.

    A max_draft_tokens above the limit is lowered to it: no output depends on it.
    """
    mode = params.verify_mode
    if mode not in pb.VerifyMode.values():
        raise InvalidRequest("speculation.verify_mode", f"{mode} is not a known mode")
    method = params.rejection_sample_method
    if method not in pb.RejectionSampleMethod.values():
        raise InvalidRequest("speculation.rejection_sample_method", f"{method} is not a known method")
    enabled = params.enabled if params.HasField("enabled") else True
    wanted = params.max_draft_tokens if params.HasField("max_draft_tokens") else None
    max_draft_tokens = None if wanted is None else min(wanted, limits.max_draft_tokens)
    return CheckedSpeculation(
        enabled=enabled and max_draft_tokens != 0,
        verify_mode=mode or default_mode,
        max_draft_tokens=max_draft_tokens,
        time_per_token_us=_time_per_token_us(params),
        drafters=_drafters(params),
        rejection_method=method or default_method,
    )


def _drafters(params: api.SpeculationParams) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for index, name in enumerate(params.drafters):
        if name != DRAFT_MODEL and name not in DRAFTER_NAMES:
            known = ", ".join(sorted({DRAFT_MODEL, *DRAFTER_NAMES}))
            raise InvalidRequest(f"speculation.drafters[{index}]", f"is none of {known}")
        names[name] = None
    return tuple(names)


def _time_per_token_us(params: api.SpeculationParams) -> int:
    if not params.HasField("time_per_token_ms"):
        return 0
    wanted_ms = params.time_per_token_ms
    if not 0.001 <= wanted_ms <= _MOST_TIME_PER_TOKEN_MS:
        message = f"{wanted_ms:g} is not between 0.001 and {_MOST_TIME_PER_TOKEN_MS:g}"
        raise InvalidRequest("speculation.time_per_token_ms", message)
    return round(wanted_ms * 1e3)


def _number(params: api.SamplingParams, name: str, limits: Limits, *, neutral: float) -> float:
    """The client's value, else the model's default, which was checked when its target connected."""
    if not params.HasField(name):  # type: ignore[arg-type]
        has_default = name in pb.SamplingDefaults.DESCRIPTOR.fields_by_name and limits.defaults.HasField(name)  # type: ignore[arg-type]
        return float(getattr(limits.defaults, name)) if has_default else neutral
    value: float = getattr(params, name)
    if (fault := RANGES[name].fault_of(value)) is not None:
        raise InvalidRequest(f"sampling.{name}", fault)
    return value


def _count(params: api.SamplingParams, name: str, highest: int, lowest: int = 0) -> int | None:
    if not params.HasField(name):  # type: ignore[arg-type]
        return None
    value: int = getattr(params, name)
    if not lowest <= value <= highest:
        raise InvalidRequest(f"sampling.{name}", f"{value} is outside {lowest}..{highest}")
    return value


def _logit_bias(params: api.SamplingParams, limits: Limits) -> dict[int, float]:
    if len(params.logit_bias) > limits.max_logit_bias:
        raise InvalidRequest("sampling.logit_bias", f"must have at most {limits.max_logit_bias} entries")
    biases = dict(params.logit_bias)
    for token_id, bias in biases.items():
        if token_id >= limits.vocab_size:
            raise InvalidRequest(f"sampling.logit_bias[{token_id}]", f"outside the vocabulary of {limits.vocab_size}")
        if (fault := LOGIT_BIAS.fault_of(bias)) is not None:
            raise InvalidRequest(f"sampling.logit_bias[{token_id}]", fault)
    return biases


def _check_constraint(constraint: pb.Constraint, limits: Limits) -> None:
    """Check sizes and ids; a target checks whether it compiles."""
    if (fault := fault_of(constraint)) is not None:
        raise InvalidRequest(f"sampling.{fault[0]}", fault[1])
    if not limits.knows_constraints:
        message = "the targets of this model do not support constraints: leave it out"
        raise InvalidRequest("sampling.constraint", message, reason="CONSTRAINTS_UNKNOWN")
    for name in ("after_token_id", "opening_token_id"):
        if (token_id := getattr(constraint, name)) >= limits.vocab_size:
            message = f"{token_id} is outside the vocabulary of {limits.vocab_size}"
            raise InvalidRequest(f"sampling.constraint.{name}", message)
    if constraint.HasField("after_token_id") and constraint.after_token:
        raise InvalidRequest("sampling.constraint.after_token", "conflicts with after_token_id: send one of them")


def _check_stop_strings(stop: Sequence[str], limits: Limits) -> None:
    if len(stop) > limits.max_stop_strings:
        raise InvalidRequest("sampling.stop", f"{len(stop)} strings exceed the limit of {limits.max_stop_strings}")
    for index, string in enumerate(stop):
        if not string:
            raise InvalidRequest(f"sampling.stop[{index}]", "must not be empty")
        if len(string.encode()) > limits.max_stop_string_bytes:
            raise InvalidRequest(f"sampling.stop[{index}]", f"must be at most {limits.max_stop_string_bytes} bytes")


def _check_token_ids(field: str, token_ids: Sequence[int], most: int, limits: Limits) -> None:
    if len(token_ids) > most:
        raise InvalidRequest(field, f"must have at most {most} ids")
    check_vocabulary(field, token_ids, limits)


def check_vocabulary(field: str, token_ids: Sequence[int], limits: Limits) -> None:
    """Refuse ids outside the vocabulary. Raises InvalidRequest. Cost: 0.01 s for a million ids."""
    if max(token_ids, default=0) >= limits.vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= limits.vocab_size)
        message = f"token id {token_ids[index]} is outside the vocabulary of {limits.vocab_size}"
        raise InvalidRequest(f"{field}[{index}]", message)
