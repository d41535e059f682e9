"""Coordinator to client: `specdec.client` and the command against a coordinator that lies."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
import typer
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from rich.console import Console

from specdec.client import Client, ClientSettings, ResumePolicy, generate_resuming
from specdec.commands import models
from specdec.commands.errors import reported_errors
from specdec.commands.generate.command import Display, run_request
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import STATUS_KEY, Complaints, require, within
from tests.fuzz.mutations import mutated
from tests.support.services.fake_coordinator import TARGET, TEXT, FakeCoordinator

_SERVICE = "specdec.v1.CoordinatorService"
_MOST_S = 20.0
_PATIENT = ResumePolicy(max_attempts=2, max_wait_s=0.05)
_CALLS = ("generate", "generate", "resuming", "complete", "abort", "tokenize", "detokenize", "model_info", "status")
_DISPLAYS = (
    Display(compare=True),
    Display(show_origin=True),
    Display(as_json=True),
    None,
)
"""What the commands show; None: `specdec models`."""


class LyingCoordinator(FakeCoordinator):
    """Answers as the fake one does; what is sent instead is said by `change`, message by message."""

    def __init__(self) -> None:
        super().__init__()
        self.change: dict[tuple[str, int], Any] = {}
        """By method and number of the message: how to change it. A status to end with has the number -1."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """All methods, by bytes."""
        unary = {"Abort": api.AbortRequest, "Tokenize": api.TokenizeRequest, "Detokenize": api.DetokenizeRequest}
        unary |= {"GetModelInfo": api.GetModelInfoRequest, "GetStatus": api.GetStatusRequest}
        made: dict[str, grpc.RpcMethodHandler] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(name), request_deserializer=request.FromString, response_serializer=bytes
            )
            for name, request in unary.items()
        }
        made["Generate"] = grpc.unary_stream_rpc_method_handler(
            self._stream, request_deserializer=api.GenerateRequest.FromString, response_serializer=bytes
        )
        return grpc.method_handlers_generic_handler(_SERVICE, made)

    def answer(self, name: str, request: Any, context: Any) -> Message:
        """What an honest one says."""
        match name:
            case "Abort":
                return api.AbortResponse(aborted=True)
            case "Tokenize":
                return api.TokenizeResponse(token_ids=[7, 8], tokens=["a", "b"])
            case "Detokenize":
                return api.DetokenizeResponse(text="ab")
            case "GetModelInfo":
                info = self.GetModelInfo(request, context)
                info.draft.CopyFrom(TARGET)
                return info
            case _:
                status = self.GetStatus(request, context)
                status.replicas[0].load.CopyFrom(pb.LoadReport(num_running=1, kv_blocks_used=3, kv_blocks_total=9))
                return status

    def _unary(self, name: str) -> Any:
        def handle(request: Any, context: grpc.ServicerContext) -> bytes:
            self._end(name, context)
            return self._changed(name, 0, self.answer(name, request, context))

        return handle

    def _stream(self, request: api.GenerateRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        number = -1
        for number, chunk in enumerate(self._answer(request)):
            yield self._changed("Generate", number, chunk)
            if number == 3:
                self._end("Generate", context)

    def _changed(self, name: str, number: int, message: Message) -> bytes:
        change = self.change.get((name, number))
        return message.SerializeToString() if change is None else change(message)

    def _end(self, name: str, context: grpc.ServicerContext) -> None:
        if (status := self.change.pop((name, -1), None)) is not None:
            code, details = status
            context.set_trailing_metadata(((STATUS_KEY, details),))
            context.abort(code, "something \x1b[31m")


class Lies:
    """Calls a coordinator that lies once, through the client or the command."""

    def __init__(self, coordinator: LyingCoordinator, address: str) -> None:
        self._coordinator = coordinator
        self._address = address

    async def try_one(self, case: Case) -> None:
        """A lie; whoever called gets an answer or a typed error, and the next answer is right."""
        rng = case.rng
        is_command = rng.random() < 0.25
        self._coordinator.change = self._lies(rng, case, may_resume=not is_command)
        if is_command:
            display = rng.choice(_DISPLAYS)
            case.what.append(f"the command, {display}")
            await within(_MOST_S, self._command(display), "the command")
        else:
            name = rng.choice(_CALLS)
            case.what.append(name)
            await within(_MOST_S, self._call(name), name)
        self._coordinator.change = {}
        async with Client(self._address) as client:
            answer = await within(_MOST_S, client.complete(_request()), "a good request")
            require(answer.choices[0].text == TEXT, f"a good request got {answer.choices[0].text!r}")

    def _lies(self, rng: random.Random, case: Case, *, may_resume: bool) -> dict[tuple[str, int], Any]:
        """One lie for each method, since the call may be of any. The command is more patient than a test."""
        lies: dict[tuple[str, int], Any] = {}
        seed = rng.random()
        if rng.random() < 0.3:
            codes = [code for code in grpc.StatusCode if may_resume or code is not grpc.StatusCode.UNAVAILABLE]
            code = rng.choice(codes[1:])
            details = mutated(rng, _status(code.value[0]))
            case.what.append(f"{code.name}: {details.what}")
            told = case.sent(details.apply())
            return {(name, -1): (code, told) for name in ("Generate", "Abort", "GetStatus", "GetModelInfo")}

        def change(message: Message) -> bytes:
            mutation = mutated(random.Random(seed), message)
            case.what.append(f"{type(message).__name__}: {mutation.what}")
            return case.sent(mutation.apply())

        for name in ("Abort", "Tokenize", "Detokenize", "GetModelInfo", "GetStatus"):
            lies[name, 0] = change
        lies["Generate", rng.randrange(14)] = change
        return lies

    async def _call(self, name: str) -> None:
        async with Client(self._address, ClientSettings(timeout_s=10.0)) as client:
            with contextlib.suppress(SpecdecError):
                match name:
                    case "generate":
                        async for _ in client.generate(_request()):
                            pass
                    case "resuming":
                        async for _ in generate_resuming(client, _request(), _PATIENT):
                            pass
                    case "complete":
                        completion = await client.complete(_request())
                        completion.require_finished()
                    case "abort":
                        await client.abort("x")
                    case "tokenize":
                        await client.tokenize("x")
                    case "detokenize":
                        await client.detokenize([7])
                    case "model_info":
                        await client.model_info()
                    case _:
                        await client.status()

    async def _command(self, display: Display | None) -> None:
        """What the command does, in this event loop: it prints, and ends with an exit code or in order."""
        written = io.StringIO()
        settings = ClientSettings(timeout_s=10.0)
        with (
            contextlib.redirect_stdout(written),
            contextlib.redirect_stderr(written),
            contextlib.suppress(typer.Exit),
            reported_errors(Console(stderr=True), self._address),
        ):
            if display is not None:
                await run_request(self._address, settings, _request(), display)
            else:
                info, status = await models.ask(self._address, settings)
                models.show(Console(), info, status)
                models.show(Console(), info, status, as_json=True)


def _request() -> api.GenerateRequest:
    request = api.GenerateRequest(prompt="x")
    request.sampling.logprobs = request.sampling.prompt_logprobs = 1
    return request


def _status(code: int) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message="something")
    info = error_details_pb2.ErrorInfo(reason="NO_TARGET", domain="specdec", metadata={"a": "b"})
    violation = error_details_pb2.BadRequest.FieldViolation(field="prompt", description="bad")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.nanos = 1_000_000
    for detail in (info, error_details_pb2.BadRequest(field_violations=[violation]), retry):
        status.details.add().Pack(detail)
    return status


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """A coordinator that lies; the command must not change how this process logs."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    coordinator = LyingCoordinator()
    server.add_generic_rpc_handlers((coordinator.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    lies = Lies(coordinator, f"127.0.0.1:{port}")
    configured = structlog.get_config()

    async def run(case: Case) -> None:
        try:
            await lies.try_one(case)
        finally:
            structlog.configure(**configured)

    try:
        yield run
    finally:
        await asyncio.to_thread(lambda: server.stop(None).wait())


LINK = Link("coordinator-client", opened)
