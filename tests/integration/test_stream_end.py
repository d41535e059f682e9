"""A replica's reason for ending a stream arrives, however busily the coordinator writes at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from structlog.testing import capture_logs

from specdec.coordinator.links.stream_end import StreamEnd
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2, target_pb2_grpc
from specdec.wire.errors import NotReady, Overloaded, Unavailable
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import expected_ids, finish, read_tokens, request, running
from tests.support.services.faults import eventually

NUM_ENDS = 30
"""Without StreamEnd most of them have another status."""
MOST_WRITTEN = 5000
"""Of many more the link would think that the replica does not read."""
DRAINING = NotReady("the replica is shutting down", reason="DRAINING", retry_after_s=2.5)


async def test_the_first_status_of_a_stream_that_ends_while_it_is_written_to_is_the_peers() -> None:
    target = ScriptedTarget()
    await target.start()
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        errors = [await end_while_writing(stub.Verify(), lambda: target.end_streams(DRAINING)) for _ in range(NUM_ENDS)]
    await target.stop()
    for error in errors:
        assert isinstance(error, Unavailable)
        assert (error.reason, error.message, error.retry_after_s) == ("DRAINING", DRAINING.message, 2.5)


async def test_the_status_of_a_stream_that_is_refused_while_it_is_written_to_is_the_peers() -> None:
    class Refusing(ScriptedTarget):
        def attach(self, attach: pb.Attach, stream: Any, response_type: Any) -> None:
            stream.abort(Overloaded("too many coordinators", reason="FULL"))

    target = Refusing()
    await target.start()
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        errors = [await end_while_writing(stub.Verify(), None) for _ in range(NUM_ENDS)]
    await target.stop()
    assert [getattr(error, "reason", error) for error in errors] == ["FULL"] * NUM_ENDS


async def end_while_writing(call: Any, make_it_end: Callable[[], None] | None) -> Exception:
    """Write to a stream without a pause until it ends, and say why it did."""
    end = StreamEnd(call)
    attach = target_pb2.VerifyRequest(attach=pb.Attach(owner_id="a test", lease_generation=1))
    num_written = 0
    try:
        await call.write(attach)
        if make_it_end is not None:
            await call.read()
        while True:
            await call.write(target_pb2.VerifyRequest())
            num_written += 1
            if num_written == 10 and make_it_end is not None:
                make_it_end()
            await asyncio.sleep(0)
    except (grpc.RpcError, asyncio.InvalidStateError) as error:
        return end.error(error)


async def test_a_stream_that_ends_well_has_no_error() -> None:
    class Closing(ScriptedTarget):
        async def Verify(self, requests: Any, context: Any) -> Any:
            yield target_pb2.VerifyResponse()

    target = Closing()
    await target.start()
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        call = stub.Verify()
        end = StreamEnd(call)
        while await call.read() is not grpc.aio.EOF:
            pass
    await target.stop()
    otherwise = Unavailable("closed")
    assert end.error(otherwise) is otherwise


async def test_a_busy_target_that_drains_says_so_and_is_not_taken_for_a_faulty_one() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    with capture_logs() as logs:
        async with running(targets, ejection_failures=1) as harness:
            call = harness.stub.Generate(request(max_tokens=40))
            result = await read_tokens(call, 10)
            for _ in range(NUM_ENDS):
                for link in harness.service.fleet.targets:
                    while not link.is_ready:
                        await harness.replica_changed()
                [holder] = [target for target in targets if target.sessions]
                [link] = [link for link in harness.service.fleet.targets if link.sessions]
                [session] = link.sessions.values()
                holder.end_streams(DRAINING)
                num_written = 0
                while link.is_up:
                    if num_written < MOST_WRITTEN:
                        link.give_credit(session)
                        num_written += 1
                    await asyncio.sleep(0)
                await until_held_by_one(targets)
            for target in targets:
                target.set_limit(None)
            await finish(call, result)
    details = [entry["detail"] for entry in logs if entry["event"] == "replica_state" and entry["state"] == "down"]
    assert details == [DRAINING.message] * NUM_ENDS
    assert "replica_ejected" not in {entry["event"] for entry in logs}
    assert result.ids() == expected_ids(targets[0], 40)


async def until_held_by_one(targets: list[ScriptedTarget]) -> None:
    """Wait until the session has moved: what its former target held is freed when that is attached again."""

    async def is_moved() -> bool:
        return sorted(len(target.sessions) for target in targets) == [0, 1]

    await eventually(is_moved, "one target has the session")
