"""The gRPC side of the Open Inference Protocol (docs/open-inference.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any

import grpc

from specdec import __version__
from specdec.coordinator.generation import GenerateCalls
from specdec.coordinator.intake.callers import Callers, encode, until_answered
from specdec.coordinator.intake.reads.reading import read_request
from specdec.coordinator.open_inference.requests import INPUTS, OUTPUTS, VERSION, check_version, read_call
from specdec.coordinator.open_inference.responses import FINAL, InferResponses
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.tasks import end_tasks
from specdec.service.byte_budget import ByteBudget
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import open_inference_pb2 as oip
from specdec.wire.abort import write_to
from specdec.wire.error_details import cut
from specdec.wire.errors import Cancelled, DeadlineExceeded, NotFound, SpecdecError, internal_error

SERVICE_NAME = "inference.GRPCInferenceService"
_MOST_AT_ONCE = 64
"""Running requests of one stream, at most: further ones are not read."""
_IDLE_S = 600.0
"""Seconds in which a stream without running requests may send none before it is ended."""
_SCALAR = [1]
_ANY = [-1]


class OpenInferenceServicer:
    """Answers clients of KServe and Triton, with the keys, quotas and limits of Generate."""

    def __init__(self, *, generator: GenerateCalls, fleet: Fleet, callers: Callers, prompt_bytes: ByteBudget) -> None:
        self._generator = generator
        self._fleet = fleet
        self._callers = callers
        self._prompt_bytes = prompt_bytes

    def register(self, server: grpc.aio.Server) -> None:
        """Add the handlers to a server. Whether it lives and is ready is told to everybody, as health is."""
        unary = grpc.stream_unary_rpc_method_handler
        handlers: dict[str, Any] = {
            "ServerLive": self._callers.handler(unary, self._live, oip.ServerLiveRequest, is_open=True),
            "ServerReady": self._callers.handler(unary, self._ready, oip.ServerReadyRequest, is_open=True),
            "ModelReady": self._callers.handler(unary, self._model_ready, oip.ModelReadyRequest),
            "ServerMetadata": self._callers.handler(unary, self._server_metadata, oip.ServerMetadataRequest),
            "ModelMetadata": self._callers.handler(unary, self._model_metadata, oip.ModelMetadataRequest),
            "ModelInfer": self._callers.handler(unary, self._infer, oip.ModelInferRequest),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream, response_serializer=encode),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def _live(self, _request: Any, _context: Any) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def _ready(self, _request: Any, _context: Any) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._is_ready)

    async def _model_ready(self, request: oip.ModelReadyRequest, _context: Any) -> oip.ModelReadyResponse:
        try:
            self._served_name(request.name, request.version)
        except NotFound:
            return oip.ModelReadyResponse(ready=False)
        return oip.ModelReadyResponse(ready=self._is_ready)

    async def _server_metadata(self, _request: Any, _context: Any) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="specdec", version=__version__, extensions=["model_stream_infer"])

    async def _model_metadata(self, request: oip.ModelMetadataRequest, _context: Any) -> oip.ModelMetadataResponse:
        told = oip.ModelMetadataResponse(
            name=self._served_name(request.name, request.version), versions=[VERSION], platform="specdec"
        )
        for name, datatype in INPUTS.items():
            told.inputs.add(name=name, datatype=datatype, shape=_ANY if name == "input_ids" else _SCALAR)
        for name, datatype in OUTPUTS.items():
            told.outputs.add(name=name, datatype=datatype, shape=_SCALAR if name == "num_input_tokens" else _ANY)
        return told

    async def _infer(
        self, request: oip.ModelInferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> oip.ModelInferResponse:
        found: list[oip.ModelInferResponse] = []

        async def keep(response: oip.ModelInferResponse) -> None:
            found.append(response)

        await self._run(request, context, until_answered(context), keep, may_stream=False)
        return found[-1]

    async def _stream(self, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Answer requests as they come, several at once. A request's error is told in its response."""
        tenant, _ = self._callers.identify(context)
        writing = asyncio.Lock()
        running: set[asyncio.Task[None]] = set()

        async def write(response: oip.ModelStreamInferResponse) -> None:
            async with writing:
                await write_to(context, response)

        try:
            data: bytes | None = await self._callers.receive(context, tenant)
            while data is not None:
                task = asyncio.create_task(self._answer(data, context, write))
                running.add(task)
                task.add_done_callback(running.discard)
                while len(running) >= _MOST_AT_ONCE:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                del data  # the request may be large, and the next one long in coming
                async with self._callers.reading_later(context, tenant):
                    data = await _next(context, running)
            while running:
                await asyncio.wait(running)
        finally:
            await end_tasks(running)

    async def _answer(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[Any, Any],
        write: Callable[[oip.ModelStreamInferResponse], Awaitable[None]],
    ) -> None:
        """Answer one request of a stream; its error is its last response."""

        async def send(response: oip.ModelInferResponse) -> None:
            await write(oip.ModelStreamInferResponse(infer_response=response))

        model_name = request_id = ""
        try:
            with ExitStack() as held:
                request = read_request(oip.ModelInferRequest, data)
                del data
                model_name, request_id = request.model_name, request.id
                await self._run(request, context, held, send, may_stream=True)
        except Exception as error:
            known = error if isinstance(error, SpecdecError) else internal_error(error)
            failed = oip.ModelInferResponse(model_name=model_name, id=request_id)
            failed.parameters[FINAL].bool_param = True
            told = oip.ModelStreamInferResponse(
                error_message=f"{known.code.name}: {cut(known.message)}", infer_response=failed
            )
            with suppress(Cancelled):  # the caller is gone
                await write(told)

    async def _run(
        self,
        request: oip.ModelInferRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        held: ExitStack,
        send: Callable[[oip.ModelInferResponse], Awaitable[None]],
        *,
        may_stream: bool,
    ) -> None:
        most_ids = self._fleet.require_served().identity.max_model_len
        call = read_call(request, may_stream=may_stream, most_ids=most_ids)
        responses = InferResponses(call, request.id)
        del request
        caller = self._callers.request_caller(context, held)
        kept = caller.held.enter_context(self._prompt_bytes.hold(caller.tenant))

        async def take(chunk: api.GenerateResponse) -> None:
            if not call.is_streamed:
                kept.grow(responses.cost(chunk))  # a whole answer is kept to its end
            response = responses.take(chunk)
            if response is not None:
                await send(response)

        await self._generator.generate(call.generate, caller, take)

    @property
    def _is_ready(self) -> bool:
        return self._fleet.served is not None and not self._generator.is_draining

    def _served_name(self, name: str, version: str) -> str:
        """Raises NotFound, or NotReady before a target has answered."""
        check_version(version)
        return self._fleet.require_served(name).identity.name


async def _next(context: grpc.aio.ServicerContext[Any, Any], running: set[asyncio.Task[None]]) -> bytes | None:
    """The next message of a stream; None at its end. Raises DeadlineExceeded when it idles for `_IDLE_S`."""
    reading = asyncio.ensure_future(context.read())
    try:
        while not (await asyncio.wait({reading}, timeout=_IDLE_S))[0]:
            if not running:
                raise DeadlineExceeded(f"no request came for {_IDLE_S:g} s", reason="STREAM_IDLE")
        data: Any = reading.result()
    finally:
        reading.cancel()
    return None if data is grpc.aio.EOF else bytes(data)
