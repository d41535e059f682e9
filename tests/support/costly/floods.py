"""Messages over gRPC in which one field has grown, and what an event loop does with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from specdec.coordinator.intake.conversions import check_detokenized
from specdec.coordinator.intake.prompt import check_prediction, check_prompt
from specdec.coordinator.intake.prompt_length import check_num_messages, check_prompt_bytes
from specdec.coordinator.intake.reads.reading import read_request
from specdec.coordinator.intake.resume import held_choices
from specdec.coordinator.intake.validation import (
    Limits,
    check_cache_salt,
    check_request_id,
    check_sampling,
    check_speculation,
)
from specdec.coordinator.open_inference.requests import read_call as read_infer
from specdec.coordinator.vllm_engine.requests import read_call as read_vllm
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip
from specdec.v1 import vllm_engine_pb2 as vllm

MOST_TOKENS = 2**20
LIMITS = Limits(
    vocab_size=150_000,
    max_model_len=MOST_TOKENS,
    max_tokens=MOST_TOKENS,
    max_choices=16,
    max_stop_strings=16,
    max_stop_string_bytes=256,
    max_logprobs=20,
    max_logit_bias=1024,
    max_prompt_bytes=4 * 2**20,
    knows_constraints=True,
    trusts_chat_templates=True,
)
_LENGTH, _VARINT = 2, 0


def varint(number: int) -> bytes:
    encoded = b""
    while number >= 128:
        encoded += bytes([number % 128 + 128])
        number //= 128
    return encoded + bytes([number])


def delimited(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | _LENGTH) + varint(len(payload)) + payload


def floods(message: Descriptor, num_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Each field at each depth, grown to so many bytes: by its own length, or by how often it comes."""
    for field in message.fields:
        is_bytes = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if field.is_repeated:
            item = delimited(field.number, b"a" if is_bytes else b"")
            if not is_bytes and field.message_type is None:
                item = varint(field.number << 3 | _VARINT) + b"\5"
                for num in (num_bytes // 3, MOST_TOKENS - 1):
                    yield f"{field.name}, packed", delimited(field.number, varint(LIMITS.vocab_size - 1) * num)
            yield f"{field.name}, again and again", item * (num_bytes // len(item))
        if is_bytes:
            yield f"{field.name}, long", delimited(field.number, b"a" * num_bytes)
        if field.message_type is not None:
            for name, payload in floods(field.message_type, num_bytes):
                yield f"{field.name}.{name}", delimited(field.number, payload)


def check(kind: type[Message], data: bytes) -> None:
    """All that is done on an event loop before a request waits for its turn."""
    request: Any = read_request(kind, data)
    if isinstance(request, oip.ModelInferRequest):
        read_infer(request, may_stream=True)
        return
    if isinstance(request, vllm.VllmGenerateRequest):
        read_vllm(request)
        return
    if not isinstance(request, api.GenerateRequest | api.TokenizeRequest | api.DetokenizeRequest):
        return
    if isinstance(request, api.DetokenizeRequest):
        check_detokenized(request.token_ids, LIMITS)
        return
    if isinstance(request, api.TokenizeRequest):
        check_num_messages(len(request.messages.messages), LIMITS)
        return
    check_request_id(request.request_id)
    check_cache_salt(request.cache_salt)
    sampling = check_sampling(request.sampling, LIMITS)
    check_speculation(request.speculation, pb.VERIFY_MODE_COUPLED, LIMITS)
    held_choices(request.resume, 16, None, LIMITS.vocab_size, max_tokens=LIMITS.max_tokens)
    check_prediction("prediction", request.prediction.token_ids.token_ids, LIMITS)
    check_num_messages(len(request.messages.messages), LIMITS)
    if request.WhichOneof("input") == "prompt":
        check_prompt_bytes("prompt", len(request.prompt.encode()), LIMITS)
    if request.WhichOneof("input") == "prompt_token_ids":
        check_prompt("prompt_token_ids", request.prompt_token_ids.token_ids, sampling, LIMITS)
