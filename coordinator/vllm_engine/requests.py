"""From vLLM's GenerateRequest to our own."""

from __future__ import annotations

import struct

from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import vllm_engine_pb2 as vllm
from specdec.wire.errors import InvalidRequest

_NOT_SERVED = {
    "kv_transfer_params": "targets do not exchange caches: send the request to one worker that does both",
    "kv_transfer_params_json": "targets do not exchange caches: send the request to one worker that does both",
    "mm_inputs": "images, videos and sound are no input: send text",
    "extra_mm_inputs": "images, videos and sound are no input: send text",
    "media_refs": "images, videos and sound are no input: send text",
}
"""Fields of a request that ask for what is not served, and the remedy."""
_FLOAT = struct.Struct("<f")
_LEAST_DIGITS, _MOST_DIGITS = 6, 9
"""Decimal digits that every 32-bit float keeps, and those that tell each from its neighbours."""


def read_call(request: vllm.VllmGenerateRequest) -> api.GenerateRequest:
    """The same request in the coordinator's terms. Raises InvalidRequest with the field."""
    for name, remedy in _NOT_SERVED.items():
        if getattr(request, name):
            raise InvalidRequest(name, f"is not served: {remedy}")
    check_rank("data_parallel_rank", request.data_parallel_rank)
    generate = api.GenerateRequest(request_id=request.request_id)
    match request.WhichOneof("input"):
        case "tokenized":
            generate.prompt_token_ids.token_ids.extend(request.tokenized.input_ids)
            generate.prompt_token_ids.SetInParent()
        case "text":
            generate.prompt = request.text
        case _:
            raise InvalidRequest("input", "one of tokenized and text is required")
    _put_sampling(request.sampling_params, generate.sampling)
    _put_constraint(request.sampling_params, generate.sampling)
    return generate


def check_rank(field: str, rank: int) -> None:
    """Raises InvalidRequest for another rank than the only one."""
    if rank:
        raise InvalidRequest(field, f"{rank} does not exist: the only rank is 0")


def decimal(value: float) -> float:
    """The shortest decimal number that a 32-bit float stands for: 0.7, not 0.699999988.

    Clients of other protocols send 0.7 as 64 bits; equal requests must have equal tokens.
    """
    for digits in range(_LEAST_DIGITS, _MOST_DIGITS):
        shown = float(f"{value:.{digits}g}")
        try:
            if _FLOAT.unpack(_FLOAT.pack(shown))[0] == value:
                return shown
        except OverflowError:  # rounded up, past the largest
            continue
    return value


def _put_sampling(given: vllm.VllmSamplingParams, sampling: api.SamplingParams) -> None:
    # Everything is set: the router has applied the model's defaults, and zero means vLLM's own.
    sampling.temperature = decimal(given.temperature) if given.HasField("temperature") else 1.0
    sampling.top_p = decimal(given.top_p) or 1.0
    sampling.top_k = given.top_k
    sampling.min_p = decimal(given.min_p)
    sampling.frequency_penalty = decimal(given.frequency_penalty)
    sampling.presence_penalty = decimal(given.presence_penalty)
    sampling.repetition_penalty = decimal(given.repetition_penalty) or 1.0
    sampling.min_tokens = given.min_tokens
    sampling.n = given.n or 1
    sampling.ignore_eos = given.ignore_eos
    sampling.skip_special_tokens = given.skip_special_tokens
    sampling.stop.extend(given.stop)
    sampling.stop_token_ids.extend(given.stop_token_ids)
    if given.HasField("max_tokens"):
        sampling.max_tokens = given.max_tokens
    if given.HasField("seed"):
        sampling.seed = given.seed % 2**64  # a negative seed is valid
    for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
        if given.HasField(name):
            value = getattr(given, name)
            if value < 0:
                raise InvalidRequest(f"sampling_params.{name}", f"{value} is not served: send a number from 0 on")
            setattr(sampling, name, value)
    for token_id, bias in given.logit_bias.items():
        if token_id < 0:
            raise InvalidRequest("sampling_params.logit_bias", f"{token_id} is no token id")
        sampling.logit_bias[token_id] = bias


def _put_constraint(given: vllm.VllmSamplingParams, sampling: api.SamplingParams) -> None:
    kind = given.WhichOneof("constraint")
    match kind:
        case None:
            return
        case "json_object":
            if given.json_object:
                sampling.constraint.json_object = True
        case "choice":
            sampling.constraint.choice.texts.extend(given.choice.choices)
            sampling.constraint.choice.SetInParent()
        case _:
            setattr(sampling.constraint, kind, getattr(given, kind))
