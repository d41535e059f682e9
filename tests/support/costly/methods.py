"""Each method over gRPC with its message, and what is done with one before it waits for its turn."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from google.protobuf.message import Message

from specdec.coordinator.intake.conversions import check_num_ids
from specdec.coordinator.intake.prompt import check_prediction, check_prompt
from specdec.coordinator.intake.prompt_length import check_num_messages, check_prompt_bytes, check_prompt_length
from specdec.coordinator.intake.reads.reading import read_request
from specdec.coordinator.intake.resume import held_choices
from specdec.coordinator.intake.validation import (
    check_cache_salt,
    check_request_id,
    check_sampling,
    check_speculation,
    check_vocabulary,
)
from specdec.coordinator.open_inference.requests import read_call as read_infer
from specdec.coordinator.vllm_engine.requests import read_call as read_vllm
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import draft_pb2, target_pb2
from specdec.v1 import open_inference_pb2 as oip
from specdec.v1 import vllm_engine_pb2 as vllm
from specdec.wire.parsing.parts import read_frame
from tests.support.costly.floods import LIMITS, floods, infers

METHODS: dict[str, type[Message]] = {
    "CoordinatorService/Generate": api.GenerateRequest,
    "CoordinatorService/Tokenize": api.TokenizeRequest,
    "CoordinatorService/Detokenize": api.DetokenizeRequest,
    "CoordinatorService/Abort": api.AbortRequest,
    "CoordinatorService/GetModelInfo": api.GetModelInfoRequest,
    "CoordinatorService/GetStatus": api.GetStatusRequest,
    "GRPCInferenceService/ModelInfer": oip.ModelInferRequest,
    "GRPCInferenceService/ModelStreamInfer": oip.ModelInferRequest,
    "GRPCInferenceService/ModelReady": oip.ModelReadyRequest,
    "GRPCInferenceService/ModelMetadata": oip.ModelMetadataRequest,
    "GRPCInferenceService/ServerLive": oip.ServerLiveRequest,
    "GRPCInferenceService/ServerReady": oip.ServerReadyRequest,
    "GRPCInferenceService/ServerMetadata": oip.ServerMetadataRequest,
    "VllmEngine/Generate": vllm.VllmGenerateRequest,
    "VllmEngine/Abort": vllm.VllmAbortRequest,
    "VllmEngine/GetLoads": vllm.VllmLoadsRequest,
    "VllmEngine/HealthCheck": vllm.VllmEmptyRequest,
    "VllmEngine/GetModelInfo": vllm.VllmEmptyRequest,
    "VllmEngine/GetServerInfo": vllm.VllmEmptyRequest,
    "VllmEngine/GetTokenizer": vllm.VllmEmptyRequest,
    "TargetService/Verify": target_pb2.VerifyRequest,
    "TargetService/Link": pb.LinkFrame,
    "TargetService/GetReplicaInfo": pb.GetReplicaInfoRequest,
    "TargetService/GetTokenizer": pb.GetTokenizerRequest,
    "TargetService/SetDrafters": target_pb2.SetDraftersRequest,
    "DraftService/Draft": draft_pb2.DraftRequest,
    "DraftService/GetReplicaInfo": pb.GetReplicaInfoRequest,
}
FRAMES = (target_pb2.VerifyRequest, pb.LinkFrame, draft_pb2.DraftRequest)
"""Of streams between services."""


def messages(kind: type[Message], num_bytes: int) -> Iterator[tuple[str, bytes]]:
    """All of a method's messages that are worth a look."""
    yield "empty", b""
    yield from floods(kind.DESCRIPTOR, num_bytes)
    if kind is oip.ModelInferRequest:
        yield from infers(num_bytes)


def check(kind: type[Message], data: bytes) -> Generator[None, None, None]:
    """All that is done on an event loop before a request waits for its turn; yields where other tasks run."""
    if kind in FRAMES:
        read_frame(kind, data)
        return
    request: Any = read_request(kind, data)
    yield
    if isinstance(request, oip.ModelInferRequest):
        read_infer(request, may_stream=True, most_ids=LIMITS.max_model_len)
        return
    if isinstance(request, vllm.VllmGenerateRequest):
        read_vllm(request)
        return
    if not isinstance(request, api.GenerateRequest | api.TokenizeRequest | api.DetokenizeRequest):
        return
    if isinstance(request, api.DetokenizeRequest):
        check_num_ids(len(request.token_ids), LIMITS)
        token_ids = request.token_ids[:]
        yield
        check_vocabulary("token_ids", token_ids, LIMITS)
        return
    if isinstance(request, api.TokenizeRequest):
        check_num_messages(len(request.messages.messages), LIMITS)
        return
    check_request_id(request.request_id)
    check_cache_salt(request.cache_salt)
    sampling = check_sampling(request.sampling, LIMITS)
    check_speculation(request.speculation, pb.VERIFY_MODE_COUPLED, LIMITS)
    yield
    yield from held_choices(request.resume, 16, None, LIMITS.vocab_size, max_tokens=LIMITS.max_tokens)
    yield
    predicted = request.prediction.token_ids.token_ids[:]
    yield
    check_prediction("prediction", predicted, LIMITS)
    yield
    check_num_messages(len(request.messages.messages), LIMITS)
    if request.WhichOneof("input") == "prompt":
        check_prompt_bytes("prompt", len(request.prompt.encode()), LIMITS)
    if request.WhichOneof("input") == "prompt_token_ids":
        check_prompt_length("prompt_token_ids", len(request.prompt_token_ids.token_ids), sampling, LIMITS)
        token_ids = request.prompt_token_ids.token_ids[:]
        yield
        check_prompt("prompt_token_ids", token_ids, sampling, LIMITS)
