"""Errors as statuses and back, and what a handler's exception becomes for a client."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any, cast

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.service.listening import StartupFailed
from specdec.service.server import Service, _serve, build_server
from specdec.service.settings import ServiceSettings
from specdec.telemetry import setup_logging
from specdec.v1.coordinator_pb2 import ResumeInfo
from specdec.wire import errors
from specdec.wire.abort import told_wait_s
from specdec.wire.channel import open_channel
from specdec.wire.errors import SpecdecError, from_rpc_error, from_status, to_status
from specdec.wire.settings import PeerSettings
from tests.support.for_each import for_each


def every_error() -> Iterator[SpecdecError]:
    for value in vars(errors).values():
        if not isinstance(value, type) or not issubclass(value, SpecdecError):
            continue
        if value is SpecdecError or value.__name__.startswith("_"):
            continue
        if value is errors.InvalidRequest:
            yield errors.InvalidRequest("sampling.top_p", "must be in (0, 1]")
        elif issubclass(value, (errors.Overloaded, errors.Unavailable)):
            yield value("later", retry_after_s=2.5, metadata={"a": "b"})
        else:
            yield value("what happened", metadata={"a": "b"})


@for_each("error", list(every_error()))
def test_every_error_survives_the_wire(error: SpecdecError) -> None:
    back = from_status(status_pb2.Status.FromString(to_status(error).SerializeToString()))

    assert type(back) is type(error)
    assert (back.message, back.reason, back.metadata) == (error.message, error.reason, error.metadata)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    assert getattr(back, "field", None) == getattr(error, "field", None)


def test_every_error_has_a_reason_of_its_own() -> None:
    reasons = [error.reason for error in every_error()]
    assert len(reasons) == len(set(reasons))


def test_invalid_request_names_its_field() -> None:
    violations = error_details_pb2.BadRequest()
    status = to_status(errors.InvalidRequest("sampling.n", "must be at least 1"))
    assert [detail.Unpack(violations) for detail in status.details] == [False, True]
    assert violations.field_violations[0].field == "sampling.n"
    assert status.code == code_pb2.INVALID_ARGUMENT


def test_a_field_that_its_description_repeats_is_told_once() -> None:
    status = to_status(errors.InvalidRequest("drafters", "drafters: there is no drafter 'magic'"))
    error = from_status(status)
    assert str(error) == "drafters: there is no drafter 'magic'"


def test_status_of_another_maker_becomes_the_class_of_its_code() -> None:
    error = from_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="connection refused"))
    assert type(error) is errors.Unavailable
    assert error.retry_after_s > 0
    assert type(from_status(status_pb2.Status(code=code_pb2.UNKNOWN))) is errors.Internal
    assert type(from_status(status_pb2.Status(code=code_pb2.INVALID_ARGUMENT))) is errors.InvalidRequest


def test_details_that_do_not_parse_count_as_missing() -> None:
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff\xff\xff")
    status = to_status(errors.InvalidRequest("prompt", "is empty", reason="EMPTY"))
    status.details.insert(0, broken)
    back = from_status(status)
    assert isinstance(back, errors.InvalidRequest)
    assert (back.field, back.reason) == ("prompt", "EMPTY")
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    no_status = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailers, "no such thing")
    error = from_rpc_error(no_status)
    assert (type(error), error.message) == (errors.NotFound, "no such thing")


@for_each("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_what_no_service_says_was_cut_off_on_the_way(code: grpc.StatusCode) -> None:
    told = "Received RST_STREAM with error code 2"  # nginx, whose upstream died
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), told), is_own_end=False)
    assert (type(error), error.reason) == (errors.Unavailable, errors.CUT_OFF)
    assert told in error.message


def test_unknown_reason_is_kept() -> None:
    status = to_status(errors.Unavailable("gone", reason="SOMETHING_NEW"))
    back = from_status(status)
    assert type(back) is errors.Unavailable
    assert back.reason == "SOMETHING_NEW"


def test_cause_of_an_internal_error_is_logged_under_the_id_that_the_caller_gets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("test")
    try:
        raise KeyError("secret detail")
    except KeyError as cause:
        status = to_status(cause)
    logging.getLogger().handlers.clear()

    assert "secret" not in status.message
    error_id = from_status(status).metadata["error_id"]
    line = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert line["error_id"] == error_id
    assert "secret detail" in json.dumps(line["exception"])


def resume_info(error: grpc.aio.AioRpcError) -> ResumeInfo:
    status = rpc_status.from_call(cast(Any, error))
    assert status is not None
    info = ResumeInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    return info


async def _raise_invalid(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
    raise errors.InvalidRequest("prompt", "is empty")


async def _raise_bug(_request: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    yield b"first"
    raise ZeroDivisionError("secret detail")


async def _overload(_request: bytes, context: grpc.aio.ServicerContext) -> None:
    await context.write(b"first")
    raise errors.Overloaded("full", retry_after_s=0.5)


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    server, port = build_server(ServiceSettings(host="127.0.0.1", port=0), tls=None)
    handlers: dict[str, Any] = {
        "Invalid": grpc.unary_unary_rpc_method_handler(_raise_invalid),
        "Bug": grpc.unary_stream_rpc_method_handler(_raise_bug),
        "Overload": grpc.unary_stream_rpc_method_handler(_overload),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("specdec.test", handlers),))
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", PeerSettings()) as channel:
        yield channel
    await server.stop(0)


async def test_handler_that_raises_ends_the_call_with_typed_details(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/specdec.test/Invalid")(b"")

    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.InvalidRequest)
    assert error.field == "prompt"


async def test_bug_in_a_stream_shows_the_client_an_id_and_nothing_else(channel: Any) -> None:
    call = channel.unary_stream("/specdec.test/Bug")(b"")
    assert await call.read() == b"first"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()

    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.Internal)
    assert error.message == f"internal error {error.metadata['error_id']}"
    assert "secret" not in repr(caught.value)


async def test_refused_clients_of_a_stream_are_told_different_delays(channel: Any) -> None:
    waits_s = []
    for _ in range(20):
        call = channel.unary_stream("/specdec.test/Overload")(b"")
        assert await call.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, errors.Overloaded)
        waits_s.append(error.retry_after_s)
    assert all(0.5 <= wait_s <= 1.0 for wait_s in waits_s)
    assert max(waits_s) - min(waits_s) > 0.2, "they would come back together"


@pytest.mark.parametrize("character", ["x", "%", "é", "中", "😀"])
async def test_an_error_of_any_length_reaches_the_client_as_what_it_is(character: str) -> None:
    resume = ResumeInfo(request_id="i" * 256, seed=2**64 - 1, resume_token=b"t" * 256)

    async def refuse(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        error = errors.InvalidRequest("sampling.stop[7]", character * 100_000, reason="TOO_LONG")
        error.attached.append(resume)
        raise error

    server, port = build_server(ServiceSettings(host="127.0.0.1", port=0), tls=None)
    handlers: dict[str, Any] = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("specdec.test", handlers),))
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", PeerSettings()) as opened:
        channel: Any = opened
        for _ in range(20):  # of what is near the limit, gRPC refuses some by chance
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/specdec.test/Refuse")(b"")
            error = from_rpc_error(caught.value)
            assert isinstance(error, errors.InvalidRequest), caught.value.details()
            assert (error.field, error.reason) == ("sampling.stop[7]", "TOO_LONG")
            assert error.description.startswith(character)
            assert resume_info(caught.value) == resume
    await server.stop(0)


def test_details_of_a_peer_that_are_too_long_are_left_out() -> None:
    status = to_status(errors.Unavailable("gone", metadata={"why": "x" * 100_000}))
    assert status.ByteSize() < 8192
    assert from_status(status).message == "gone"


async def test_error_of_a_peer_that_is_not_there_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1", PeerSettings()) as opened:
        channel: Any = opened
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/specdec.test/Invalid")(b"", timeout=60)
    assert isinstance(from_rpc_error(caught.value), errors.Unavailable)


@pytest.mark.parametrize(("wait_s", "most_s"), [(0.0, 0.0), (0.5, 1.0), (4.0, 8.0), (3600.0, 3605.0)])
def test_refused_callers_are_told_waits_that_differ_and_are_hardly_longer_than_long_ones(
    wait_s: float, most_s: float
) -> None:
    told = [told_wait_s(wait_s, Random(seed).uniform) for seed in range(200)]
    assert wait_s <= min(told) <= max(told) <= most_s
    assert max(told) - min(told) >= 0.9 * (most_s - wait_s)


class NoFilesLeft:
    name, grpc_names = "target", ()

    async def start(self) -> None:
        raise OSError(24, "Too many open files")


async def test_a_service_without_the_files_to_start_says_so_in_place_of_a_traceback() -> None:
    never = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(StartupFailed, match="Too many open files"):
        await _serve(cast(Service, NoFilesLeft()), cast(Any, None), cast(Any, never), asyncio.Event())
    never.cancel()
