"""What an engine says that is no frame, or a frame that makes no sense: which streams it costs, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2

from specdec.replica.bridge.frames import FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import Internal, NotReady, SpecdecError, Unavailable, from_rpc_error
from specdec.wire.parsing.reading import abort_status
from tests.support.services.echo_process import SERVICE, error_of, verify_stream
from tests.support.services.faults import eventually
from tests.support.services.lying_engine import SAY_RAW, lying_replica, say


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff\xff", *(status_pb2.Status(code=code).SerializeToString() for code in (0, code_pb2.UNKNOWN, 4711))],
)
def test_an_abort_without_an_errors_status_is_internal_and_says_so(payload: bytes) -> None:
    status = abort_status(payload)
    assert status.code == code_pb2.INTERNAL
    assert len(status.details) == 1


def test_an_abort_with_a_text_that_no_trailer_holds_is_cut() -> None:
    status = abort_status(status_pb2.Status(code=code_pb2.ABORTED, message="x" * 100_000).SerializeToString())
    assert status.code == code_pb2.ABORTED
    assert 1000 < len(status.message) < 4096


async def echoed(call: Any, payload: bytes) -> bool:
    await call.write(payload)
    return await call.read() == payload


async def test_an_abort_that_does_not_parse_ends_its_own_stream_and_no_other() -> None:
    async with lying_replica() as channel:
        beside = verify_stream(channel)
        assert await echoed(beside, b"one")
        bad = verify_stream(channel)  # only now, so that it is the servicer's second
        assert await echoed(bad, b"two")
        await bad.write(say(FrameKind.STREAM_ABORT, 2, b"\xff\xff"))
        error = await error_of(bad)
        assert isinstance(error, Internal)
        assert error.reason == "MALFORMED_ANSWER"
        assert await echoed(beside, b"three")


async def test_a_load_that_does_not_parse_and_a_second_ready_change_nothing() -> None:
    async with lying_replica() as channel:
        call = verify_stream(channel)
        await call.write(say(FrameKind.LOAD, 0, pb.LoadReport(num_running=7).SerializeToString()))
        await call.write(say(FrameKind.LOAD, 0, pb.LoadReport(num_running=8).SerializeToString() + b"\xff"))
        await call.write(say(FrameKind.READY, 0, b"\xff"))
        await call.write(say(FrameKind.READY, 0, pb.GetReplicaInfoResponse(version="9").SerializeToString()))
        await call.write(say(FrameKind.TOKENIZER, 0, b"\xff"))
        assert await echoed(call, b"still here")
        ask: Any = channel.unary_unary(
            f"/{SERVICE}/GetReplicaInfo", response_deserializer=pb.GetReplicaInfoResponse.FromString
        )
        info = await ask(b"")
    assert info.identity.name == "liar"
    assert info.version != "9"
    assert info.load.num_running == 7


@pytest.mark.parametrize("raw", [b"\xff" * 9, b"\0\0\0\0\x63\0\0\0\0"])
async def test_after_bytes_that_are_no_frames_all_streams_end_with_a_type_and_the_next_engine_serves(
    raw: bytes,
) -> None:
    async with lying_replica() as channel:
        beside, bad = verify_stream(channel), verify_stream(channel)
        assert await echoed(beside, b"one")
        assert await echoed(bad, b"two")
        await bad.write(SAY_RAW + raw)
        for call in (beside, bad):
            error = await error_of(call)
            assert isinstance(error, Unavailable)
            assert error.reason == "ENGINE_GONE"
        await eventually(lambda: _serves(channel), "the next engine serves")


async def _serves(channel: grpc.aio.Channel) -> bool:
    call = verify_stream(channel)
    try:
        return await echoed(call, b"again")
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        # A write to a stream that has just ended may lose its status: gRPC then tells its own.
        is_told = isinstance(error, grpc.aio.AioRpcError) and error.details() != "Internal error from Core"
        known: SpecdecError | None = from_rpc_error(error) if is_told else None
        assert known is None or isinstance(known, NotReady)
        return False
