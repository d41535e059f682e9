"""Streams of events: their framing, their speed, and their end whatever ends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect

from specdec.gateway.api.errors import ApiError
from specdec.gateway.http.events import KEPT_ALIVE, Event, EventStream, begun, framed, while_connected
from specdec.gateway.routes.answers import JsonResponse
from specdec.gateway.routes.merging import all_of, merged
from specdec.gateway.routes.output import kept
from specdec.gateway.upstream.coordinators import Coordinators
from specdec.service.byte_budget import ByteBudget
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Overloaded
from tests.support.services.chunks import delta, texts_of


class Wire:
    """Both directions of one request; `leave` is the client's."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_slow = False
        self.blocked = asyncio.Event()
        self._left = asyncio.Event()
        self._read = asyncio.Semaphore(0)

    async def receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.is_slow:
            self.blocked.set()
            await self._read.acquire()
        self.sent.append(message)

    def read(self) -> None:
        self._read.release()

    def leave(self) -> None:
        self._left.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Source:
    """Yields events, and knows how far it is and whether it was closed."""

    def __init__(self, num: int, fails: Exception | None = None) -> None:
        self.num_given = 0
        self.is_closed = False
        self._num = num
        self._fails = fails

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        try:
            for number in range(self._num):
                self.num_given += 1
                yield [{"number": number}]
            if self._fails is not None:
                raise self._fails
        finally:
            self.is_closed = True


def told(error: BaseException) -> ApiError:
    return error if isinstance(error, ApiError) else ApiError(500, "oh")


async def run(source: Source, wire: Wire) -> None:
    stream = EventStream(await begun(source.batches()), on_error=told)
    await stream({"type": "http", "state": {}}, wire.receive, wire.send)


async def test_events_are_framed_and_done_is_last() -> None:
    wire = Wire()
    await run(Source(2), wire)
    assert wire.body == b'data: {"number":0}\n\ndata: {"number":1}\n\ndata: [DONE]\n\n'
    headers = dict(wire.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert wire.sent[-1]["more_body"] is False


def test_no_text_breaks_the_frame() -> None:
    event = {"text": "a\n\ndata: [DONE]\n\n\u2028 é"}
    frame = framed(event)
    assert frame.count(b"\n") == 2
    assert json.loads(frame.removeprefix(b"data: ")) == event


async def test_nothing_is_taken_while_the_client_does_not_read() -> None:
    wire, source = Wire(), Source(5)
    wire.is_slow = True
    running = asyncio.create_task(run(source, wire))
    await wire.blocked.wait()
    assert source.num_given == 1  # what was looked at
    for expected in (1, 2, 3):
        wire.blocked.clear()
        wire.read()
        await wire.blocked.wait()
        assert source.num_given == expected
    wire.leave()
    await running
    assert source.is_closed


async def test_a_client_that_leaves_closes_the_source() -> None:
    wire, source = Wire(), Source(10)
    wire.is_slow = True
    scope: dict[str, Any] = {"type": "http", "state": {}}
    stream = EventStream(await begun(source.batches()), on_error=told)
    running = asyncio.create_task(stream(scope, wire.receive, wire.send))
    await wire.blocked.wait()
    wire.leave()
    await running
    assert scope["state"]["is_client_gone"]


async def test_an_error_in_mid_stream_is_the_last_event() -> None:
    wire = Wire()
    await run(Source(1, ApiError(503, "gone", code="service_unavailable")), wire)
    events = wire.body.split(b"\n\n")
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["message"] == "gone"
    assert events[2] == b"data: [DONE]"


async def test_an_error_before_the_first_event_is_raised_and_closes_the_source() -> None:
    source = Source(0, ApiError(429, "full"))
    with pytest.raises(ApiError, match="full"):
        await begun(source.batches())
    assert source.is_closed


async def test_what_was_looked_at_comes_first() -> None:
    source = Source(3)
    batches = await begun(source.batches())
    assert source.num_given == 1
    assert await batches.first == [{"number": 0}]
    assert [event["number"] async for events in batches.rest for event in events] == [1, 2]


class Thinking(Source):
    """Gives nothing before it is told to."""

    def __init__(self, num: int, fails: Exception | None = None) -> None:
        super().__init__(num, fails)
        self.may_speak = asyncio.Event()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        try:
            await self.may_speak.wait()
            async for batch in super().batches():
                yield batch
        finally:
            self.is_closed = True


@pytest.mark.parametrize("fails", [None, ApiError(503, "gone")])
async def test_a_silent_stream_has_its_headers_and_comments_and_then_its_events(fails: ApiError | None) -> None:
    wire, source = Wire(), Thinking(2, fails)
    batches = await begun(source.batches(), patience_s=0.001)
    stream = EventStream(batches, on_error=told, keep_alive_s=0.001)
    running = asyncio.create_task(stream({"type": "http", "state": {}}, wire.receive, wire.send))
    wire.is_slow = True
    for _ in range(4):  # headers and three comments
        await wire.blocked.wait()
        wire.blocked.clear()
        wire.read()
    wire.is_slow = False
    assert wire.sent[0]["status"] == 200
    assert wire.body.count(KEPT_ALIVE) >= 2
    wire.read()
    source.may_speak.set()
    await running
    told_to_client = wire.body.replace(KEPT_ALIVE, b"").split(b"\n\n")
    assert told_to_client[:2] == [b'data: {"number":0}', b'data: {"number":1}']
    assert (b"gone" in told_to_client[2]) == (fails is not None)
    assert told_to_client[-2:] == [b"data: [DONE]", b""]
    assert source.is_closed


async def test_a_client_that_leaves_a_silent_stream_closes_the_source() -> None:
    wire, source = Wire(), Thinking(1)
    stream = EventStream(await begun(source.batches(), patience_s=0.001), on_error=told, keep_alive_s=60.0)
    wire.leave()
    await stream({"type": "http", "state": {}}, wire.receive, wire.send)
    assert source.is_closed


async def test_work_of_a_client_that_left_is_cancelled_before_it_is_told() -> None:
    wire, has_ended = Wire(), False

    async def work() -> None:
        nonlocal has_ended
        try:
            await asyncio.Event().wait()
        finally:
            has_ended = True

    wire.leave()
    with pytest.raises(ClientDisconnect):
        await while_connected(wire.receive, work())
    assert has_ended


async def test_merged_streams_give_all_that_each_gives_in_its_order() -> None:
    sources = [Source(number) for number in (3, 0, 4)]
    events = [event["number"] async for events in merged([s.batches() for s in sources]) for event in events]
    assert sorted(events) == [0, 0, 1, 1, 2, 2, 3]
    assert all(source.is_closed for source in sources)


async def test_the_first_error_of_merged_streams_ends_all() -> None:
    endless = Source(10**9)
    streams = merged([endless.batches(), Source(2, ApiError(500, "oh")).batches()])
    with pytest.raises(ApiError, match="oh"):
        async for _ in streams:
            pass
    assert endless.is_closed


async def test_the_first_error_of_several_calls_cancels_the_others() -> None:
    has_ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ApiError(500, "oh")

    with pytest.raises(ApiError, match="oh"):
        await all_of([waits(), fails()])
    assert has_ended.is_set()


def test_each_chunk_of_an_answer_that_is_kept_whole_holds_bytes() -> None:
    coordinators = Coordinators(cast("Any", lambda address: None), {"": ["x:1"]}, lambda: None)  # never called
    budget, told = ByteBudget(total_bytes=1000, client_bytes=1000), list[api.GenerateResponse]()
    with budget.hold("other", 500), budget.hold("client") as held:
        add = kept(coordinators.caller((), held), lambda chunk, _: told.append(chunk))
        add(delta("x" * 100), texts_of([]))
        assert held.num_bytes >= 300
        with pytest.raises(Overloaded):
            add(delta("x" * 100), texts_of([]))
    assert (len(told), budget.num_bytes) == (1, 0)


def test_integers_of_any_size_are_written_in_events_and_answers() -> None:
    told = {"metadata": {"a": 10**30 + 1, "b": "é"}}
    assert json.loads(framed(told).removeprefix(b"data: ")) == told == json.loads(JsonResponse(told).body)
