"""The gRPC side of vLLM's own service (docs/vllm-grpc.md)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import grpc

from specdec import __version__
from specdec.coordinator.generation import GenerateCalls
from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.callers import Callers, encode, until_answered
from specdec.coordinator.intake.validation import Limits
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.vllm_engine.requests import check_rank, read_call
from specdec.coordinator.vllm_engine.responses import VllmResponses
from specdec.coordinator.vllm_engine.tokenizer_archive import TokenizerArchives
from specdec.service.byte_budget import ByteBudget
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import vllm_engine_pb2 as vllm
from specdec.wire.abort import write_to
from specdec.wire.errors import InvalidRequest

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
_MOST_ABORTED = 256
"""Requests of one call to Abort, at most: each may be looked up in the store."""
_PIECE_BYTES = 64 * 1024
"""Bytes of a message with a piece of the tokenizer, as vLLM sends it."""
_MOST_INT32 = 2**31 - 1
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling defaults that routers apply."""


class VllmEngineServicer:
    """Answers routers as a vLLM worker does, with the keys, quotas and limits of Generate.

    Embeddings, profiles, cache flushes and cache events are not served: UNIMPLEMENTED, which routers take.
    """

    def __init__(
        self,
        *,
        generator: GenerateCalls,
        fleet: Fleet,
        admission: AdmissionQueue,
        limits_of: Callable[[pb.ModelIdentity], Limits],
        callers: Callers,
        prompt_bytes: ByteBudget,
    ) -> None:
        self._generator = generator
        self._fleet = fleet
        self._admission = admission
        self._limits_of = limits_of
        self._callers = callers
        self._prompt_bytes = prompt_bytes
        self._archives = TokenizerArchives(fleet)
        self._started_s = time.monotonic()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the handlers to a server. Its health is told to everybody."""
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handler = self._callers.handler
        handlers: dict[str, Any] = {
            "HealthCheck": handler(unary, self._health, vllm.VllmEmptyRequest, is_open=True),
            "Generate": handler(stream, self._generate, vllm.VllmGenerateRequest),
            "Abort": handler(unary, self._abort, vllm.VllmAbortRequest),
            "GetModelInfo": handler(unary, self._model_info, vllm.VllmEmptyRequest),
            "GetServerInfo": handler(unary, self._server_info, vllm.VllmEmptyRequest),
            "GetLoads": handler(unary, self._loads, vllm.VllmLoadsRequest),
            "GetTokenizer": handler(stream, self._tokenizer, vllm.VllmEmptyRequest),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def _health(self, _request: Any, _context: Any) -> vllm.VllmHealthCheckResponse:
        is_healthy = self._fleet.served is not None and not self._generator.is_draining
        return vllm.VllmHealthCheckResponse(
            healthy=is_healthy, message="" if is_healthy else "no target has answered, or the coordinator drains"
        )

    async def _generate(self, request: vllm.VllmGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        generate = read_call(request)
        responses = VllmResponses(generate, is_streamed=request.stream)
        caller = self._callers.request_caller(context, until_answered(context))
        kept = caller.held.enter_context(self._prompt_bytes.hold(caller.tenant))

        async def take(chunk: api.GenerateResponse) -> None:
            if not request.stream:
                kept.grow(chunk.ByteSize())  # a whole answer is kept to its end
            for response in responses.take(chunk):
                await write_to(context, response)

        await self._generator.generate(generate, caller, take)

    async def _abort(
        self, request: vllm.VllmAbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> vllm.VllmAbortResponse:
        if len(request.request_ids) > _MOST_ABORTED:
            raise InvalidRequest("request_ids", f"has more than {_MOST_ABORTED} ids: send several calls")
        tenant, _ = self._callers.identify(context)
        for request_id in request.request_ids:
            await self._generator.abort(tenant, request_id)
        return vllm.VllmAbortResponse()

    async def _model_info(self, _request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> vllm.VllmModelInfo:
        served = self._fleet.require_served()
        limits = self._limits_of(served.identity).within(self._callers.identify(context)[1])
        defaults = {field.name: value for field, value in limits.defaults.ListFields() if field.name in _DEFAULTS}
        tokens = served.tokenizer.describe()
        ids = {name: served.tokenizer.token_id(getattr(tokens, f"{name}_token")) or 0 for name in ("bos", "pad")}
        return vllm.VllmModelInfo(
            model_path=served.identity.name,
            served_model_name=served.identity.name,
            is_generation=True,
            max_context_length=limits.max_model_len,
            max_req_input_len=min(limits.max_model_len, _MOST_INT32),
            vocab_size=served.identity.vocab_size,
            architectures=[served.identity.architecture],
            eos_token_ids=[token_id for token_id in served.identity.eos_token_ids if token_id <= _MOST_INT32],
            bos_token_id=ids["bos"],
            pad_token_id=ids["pad"],
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def _server_info(self, _request: Any, _context: Any) -> vllm.VllmServerInfo:
        return vllm.VllmServerInfo(
            active_requests=self._admission.num_running,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="specdec",
            data_parallel_size=1,
            max_num_seqs=self._admission.max_running,
            constrained_decoding_start="first_token",
        )

    async def _loads(self, request: vllm.VllmLoadsRequest, _context: Any) -> vllm.VllmLoadsResponse:
        check_rank("dp_rank", request.dp_rank)
        num_running, num_waiting = self._admission.num_running, self._admission.num_waiting
        load = vllm.VllmSchedulerLoad(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_total_reqs=num_running + num_waiting,
            max_running_requests=self._admission.max_running,
        )
        return vllm.VllmLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=[load]
        )

    async def _tokenizer(self, _request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The archive in pieces. A caller that reads slowly holds its bytes of the tenant's budget."""
        archive = await self._archives.archive()
        tenant, _ = self._callers.identify(context)
        until_answered(context).enter_context(self._prompt_bytes.hold(tenant, len(archive)))
        for start in range(0, len(archive), _PIECE_BYTES):
            is_last = start + _PIECE_BYTES >= len(archive)
            sha256 = hashlib.sha256(archive).hexdigest() if is_last else ""
            piece = vllm.VllmTokenizerChunk(data=archive[start : start + _PIECE_BYTES], sha256=sha256)
            await write_to(context, encode(piece))
