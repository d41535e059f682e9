"""Translate sampling and speculation parameters from HTTP to gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from specdec.gateway.api.errors import invalid
from specdec.gateway.api.fields import PackedIds, SamplingFields, Speculation
from specdec.gateway.translation.constraint import constraint_of
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_MODES = MappingProxyType(
    {"coupled": pb.VERIFY_MODE_COUPLED, "rejection": pb.VERIFY_MODE_REJECTION, None: pb.VERIFY_MODE_UNSPECIFIED}
)
_METHODS = MappingProxyType({
    "standard": pb.REJECTION_SAMPLE_METHOD_STANDARD,
    "block": pb.REJECTION_SAMPLE_METHOD_BLOCK,
    None: pb.REJECTION_SAMPLE_METHOD_UNSPECIFIED,
})  # fmt: skip
_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("n", "min_tokens", "ignore_eos", "skip_special_tokens", "truncate_prompt_tokens", "prompt_logprobs"),
)
FIELD_NAMES = MappingProxyType({"include_stop_in_output": "include_stop_str_in_output"})
"""HTTP field names by gRPC field names, where they differ."""


def sampling_params(request: SamplingFields, *, max_tokens: int | None, logprobs: int | None) -> api.SamplingParams:
    """The request's parameters; missing ones stay unset."""
    params = api.SamplingParams(
        stop=request.stop_strings,
        stop_token_ids=request.stop_token_ids or (),
        allowed_token_ids=request.allowed_token_ids or (),
        bad_words=request.bad_words or (),
        logit_bias={int(token_id): bias for token_id, bias in (request.logit_bias or {}).items()},
        max_tokens=max_tokens,
        logprobs=logprobs,
        include_stop_in_output=request.include_stop_str_in_output,
    )
    for name in _SAME_NAMES:
        if (value := getattr(request, name)) is not None:
            setattr(params, name, value)
    if request.top_k is not None:
        params.top_k = max(0, request.top_k)
    if request.seed is not None:
        params.seed = request.seed % 2**64  # a negative seed is valid
    return params


def speculation_params(speculation: Speculation | None) -> api.SpeculationParams | None:
    """The request's speculation parameters, or None."""
    if speculation is None:
        return None
    return api.SpeculationParams(
        enabled=speculation.enabled,
        verify_mode=_MODES[speculation.verify_mode],
        rejection_sample_method=_METHODS[speculation.rejection_sample_method],
        max_draft_tokens=speculation.max_draft_tokens,
        time_per_token_ms=speculation.time_per_token_ms,
        drafters=speculation.drafters or (),
    )


def generate_request(
    request: SamplingFields, sampling: api.SamplingParams, after_token: str, unenforced: list[str]
) -> api.GenerateRequest:
    """The gRPC request without prompt and id. A constraint begins after `after_token`.

    `unenforced` gets the paths of a schema's keywords that are not enforced. Raises ApiError and InvalidRequest.
    """
    if (constraint := constraint_of(request, after_token, unenforced)) is not None:
        sampling.constraint.CopyFrom(constraint)
    return api.GenerateRequest(
        model=request.model or "",
        sampling=sampling,
        speculation=speculation_params(request.speculation),
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        prompt_logprobs_in_parts=True,
        with_steps=bool(request.return_steps),
    )


def add_token_ids(to: api.TokenIds, ids: Sequence[int] | PackedIds) -> None:
    """Add token ids to an empty message."""
    if isinstance(ids, PackedIds):
        to.MergeFromString(bytes(ids.wire))
    else:
        to.token_ids.extend(ids)


def check_stream(request: SamplingFields) -> None:
    """Check options that only streams have, or lack. Raises ApiError."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "needs stream to be true")
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is not available in streams: leave one of them out")
