"""Clients that end their sending direction wait for answers; those that have closed both are noticed."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import struct
import tracemalloc
from typing import Any

import pytest

from tests.support.services.raw_http1 import raw_connection

ASKS = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers with the path when it may; knows which requests were left."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.was_asked = asyncio.Event()
        self.was_left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.was_asked.set()
        path = scope["path"].encode()
        await send_start(send, len(path)) if path == b"/streams" else None
        await receive()
        gone, told = asyncio.create_task(receive()), asyncio.create_task(self.may_answer.wait())
        await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, told):
            task.cancel()
        if not told.done():
            self.was_left.set()
            return
        await send_start(send, len(path)) if path != b"/streams" else None
        await send({"type": "http.response.body", "body": path})


async def send_start(send: Any, length: int) -> None:
    headers = [(b"content-length", b"%d" % length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


@pytest.mark.parametrize("paths", [(b"one",), (b"streams",), (b"one", b"two", b"three")], ids=str)
async def test_who_has_sent_all_gets_all_answers_and_the_end(paths: tuple[bytes, ...]) -> None:
    app = App()
    async with raw_connection(app) as (reader, writer):
        writer.write(b"".join(ASKS % path for path in paths))
        writer.write_eof()
        await app.was_asked.wait()
        told = b""
        if paths == (b"one",):
            told = await reader.readuntil(b"\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 100 ")  # a client that has left would reset the connection now
        app.may_answer.set()
        told += await reader.read()
    assert re.findall(rb"\r\n\r\n/([a-z]+)", told) == list(paths)
    assert told.count(b"HTTP/1.1 200 ") == len(paths)


@pytest.mark.parametrize(
    "request_bytes",
    [ASKS % b"one", ASKS.replace(b"1.1", b"1.0") % b"one", ASKS % b"one" + ASKS % b"two"],
    ids=["1.1", "1.0", "another waits"],
)
async def test_who_has_left_is_noticed(request_bytes: bytes) -> None:
    app = App()
    async with raw_connection(app) as (_, writer):
        writer.write(request_bytes)
        await app.was_asked.wait()
        writer.close()
        await app.was_left.wait()


async def test_who_resets_a_stream_while_another_request_waits_is_noticed() -> None:
    app = App()
    async with raw_connection(app) as (_, writer):
        writer.write(ASKS % b"streams" + ASKS % b"two")
        await app.was_asked.wait()
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.close()
        await app.was_left.wait()


async def test_bodies_of_requests_that_wait_go_with_their_client() -> None:
    app = App()
    body = b"POST /two HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + bytes(60_000)
    gc.disable()  # a collection would free them some day
    tracemalloc.start()
    try:
        async with raw_connection(app) as (_, writer):
            writer.write(ASKS % b"one" + body * 3)
            await app.was_asked.wait()
            before = tracemalloc.get_traced_memory()[0]
            writer.close()
            await app.was_left.wait()
            await asyncio.sleep(0)
            assert before - tracemalloc.get_traced_memory()[0] > 100_000
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_of_requests_without_end_the_first_are_answered_and_the_last_answer_says_so() -> None:
    app = App()
    async with raw_connection(app) as (reader, writer):
        writer.write(ASKS % b"one" * 2000)
        await app.was_asked.wait()
        app.may_answer.set()
        *answers, last = re.findall(rb"HTTP/1.1 200 OK.*?/one", await reader.read(), re.DOTALL)
    assert 0 < len(answers) < 100
    assert b"connection: close" in last
    assert not any(b"connection: close" in answer for answer in answers)


async def test_who_leaves_within_a_request_is_noticed() -> None:
    app = App()
    async with raw_connection(app) as (reader, writer):
        writer.write(b"POST /one HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n12")
        await app.was_asked.wait()
        writer.write_eof()
        assert await reader.read() == b""


CODINGS = [b"gzip, chunked", b"gzip", b"chunked, chunked", b"identity", b"chunked;q=1"]


@pytest.mark.parametrize(("coding", "version"), [*((each, b"1.1") for each in CODINGS), (b"chunked", b"1.0")], ids=str)
async def test_transfer_codings_besides_chunked_and_all_before_http_1_1_are_refused(
    coding: bytes, version: bytes
) -> None:
    app = App()
    async with raw_connection(app) as (reader, writer):
        writer.write(b"POST /one HTTP/%s\r\nhost: x\r\ntransfer-encoding: %s\r\n\r\n0\r\n\r\n" % (version, coding))
        told = await reader.read()
    assert told.startswith((b"HTTP/1.1 501 ", b"HTTP/1.1 400 "))
    assert b"connection: close" in told
    assert not app.was_asked.is_set()
