"""Messages over gRPC in which one field has grown."""

from __future__ import annotations

import json
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from specdec.coordinator.intake.validation import Limits
from specdec.v1 import open_inference_pb2 as oip

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


def infers(num_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Requests of the Open Inference protocol whose parts belong together, the prompt's or a parameter's grown."""
    for name, datatype, raw, num in (
        ("text_input", "BYTES", bytes(num_bytes), num_bytes // 4),
        ("stream", "BOOL", b"\1" * num_bytes, num_bytes),
        ("input_ids", "BOOL", b"\1" * num_bytes, num_bytes),
        ("input_ids", "BYTES", bytes(num_bytes), num_bytes // 4),
        ("input_ids", "INT32", bytes(num_bytes), num_bytes // 4),
        ("input_ids", "UINT64", bytes(8 * MOST_TOKENS), MOST_TOKENS),
        ("input_ids", "INT64", b"\xff" * 8 * MOST_TOKENS, MOST_TOKENS),
    ):
        tensor = oip.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[num])
        yield f"{num} {datatype} of {name}", _infer(tensor, raw)
    typed = oip.ModelInferRequest(inputs=[{"name": "input_ids", "datatype": "INT64", "shape": [MOST_TOKENS]}])
    typed.inputs[0].contents.int64_contents.extend([LIMITS.vocab_size - 1] * MOST_TOKENS)
    yield "typed ids", typed.SerializeToString()
    for name, value in (
        ("allowed_token_ids", [1] * 100_000),
        ("allowed_token_ids", [1] * 16_384),
        ("bad_words", [""] * 60_000),
        ("logit_bias", dict.fromkeys(map(str, range(25_000)), 0)),
        ("prediction", {"token_ids": {"token_ids": [1] * 100_000}}),
        ("structured_outputs", {"choice": [""] * 60_000}),
        ("structured_outputs", {"json": {"enum": [1] * 100_000}}),
        ("unknown", [[]] * 60_000),
    ):
        text = json.dumps({name: value}, separators=(",", ":")).encode()
        tensor = oip.ModelInferRequest.InferInputTensor(name="sampling_parameters", datatype="BYTES", shape=[1])
        yield f"{len(text)} bytes of {name}", _infer(tensor, len(text).to_bytes(4, "little") + text)


def _infer(tensor: oip.ModelInferRequest.InferInputTensor, raw: bytes) -> bytes:
    """A request with this input and what it needs besides."""
    others = {"exclude_input_in_output": ("BOOL", b"\1")}
    if tensor.name == "sampling_parameters":
        others |= {"text_input": ("BYTES", b"\1\0\0\0a")}
    request = oip.ModelInferRequest(inputs=[tensor], raw_input_contents=[raw])
    for name, (datatype, content) in others.items():
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(content)
    return request.SerializeToString()
