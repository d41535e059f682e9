"""What no client of ours sends, to a gateway process: a refusal, little of its time, and no other stream disturbed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from tests.support.services.clusters import TIMEOUTS
from tests.support.services.faults import PATIENCE_S, make_request

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MOST_BODY_BYTES = 8 * 1024 * 1024
MOST_COST = 25
"""Processor time of a request, in units of what Python's json takes for the largest body: five times what it takes."""
MOST_ANSWER_BYTES = 4096
NUM_TOKENS = 200
PROMPT = "Once upon a time"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Front:
    """A gateway process."""

    host: str
    port: int
    process: psutil.Process
    coordinator: str

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=f"http://{self.host}:{self.port}", timeout=PATIENCE_S)

    def busy_s(self) -> float:
        """Processor time that it has taken."""
        times = self.process.cpu_times()
        return times.user + times.system

    async def answer(self, data: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to these bytes; 0 where the connection just ends."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            status = await reader.readline()
            if not status:
                return 0, b""
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
            return int(status.split()[1]), body
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0, b""
        finally:
            writer.close()


@pytest.fixture(scope="module")
def front(tiny_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Before the shared cluster; it closes connections whose headers take long."""
    settings = RoleSettings(overrides={"coordinators": [tiny_cluster.address], "header_read_s": 8.0})
    spec = service_spec("gateway", "gateway", free_port(), settings, environment=os.environ)
    with Cluster([spec], log_dir=Path(tmp_path_factory.mktemp("gateway")), timeouts=TIMEOUTS) as cluster:
        cluster.start()
        pid = cluster.services["gateway"].pid
        assert pid is not None
        host, _, port = spec.address.partition(":")
        yield Front(host, int(port), psutil.Process(pid), tiny_cluster.address)


@pytest.fixture(scope="module")
def expected(front: Front) -> list[int]:
    """The undisturbed stream."""

    async def ask() -> list[int]:
        async with Client(front.coordinator) as client:
            body = make_request(prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
            return (await client.complete(body)).choices[0].token_ids

    return asyncio.run(ask())


@asynccontextmanager
async def undisturbed(front: Front, expected: list[int]) -> AsyncIterator[None]:
    """Streams one after the other, of which each is as it should be; the last one runs beyond the end."""
    is_over = asyncio.Event()
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 3, "ignore_eos": True}

    async def stream() -> None:
        async with front.http() as client:
            while True:
                asked = {**body, "return_token_ids": True, "stream": True}
                ids: list[int] = []
                async with client.stream("POST", COMPLETIONS, json=asked) as response:
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line.removeprefix("data: "))
                            ids += [token for choice in event["choices"] for token in choice["token_ids"]]
                assert ids == expected
                if is_over.is_set():
                    return

    streaming = asyncio.create_task(stream())
    try:
        yield
    finally:
        is_over.set()
        await streaming


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: x", b"content-type: application/json", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""]) + body


def chunked(path: str, size: int) -> bytes:
    """A body without a length, of one chunk after the other."""
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: x", b"content-type: application/json"]
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b""]) + chunk * (size // 0x10000)


def filled(prefix: bytes, item: bytes, suffix: bytes) -> bytes:
    """As large a body as is read, made of one item again and again."""
    count = (MOST_BODY_BYTES - len(prefix) - len(suffix)) // (len(item) + 1)
    return prefix + ((item + b",") * count)[:-1] + suffix


LARGE: dict[str, tuple[str, bytes]] = {
    "a prompt of millions of ids": (COMPLETIONS, filled(b'{"prompt":[', b"1", b"]}")),
    "a prompt of letters": (COMPLETIONS, b'{"prompt":"' + b"a" * (MOST_BODY_BYTES - 20) + b'"}'),
    "prompts without end": (COMPLETIONS, filled(b'{"prompt":[', b'"a"', b"]}")),
    "stop strings without end": (COMPLETIONS, filled(b'{"prompt":"x","stop":[', b'"a"', b"]}")),
    "stop tokens without end": (COMPLETIONS, filled(b'{"prompt":"x","stop_token_ids":[', b"1", b"]}")),
    "wrong stop tokens without end": (COMPLETIONS, filled(b'{"prompt":"x","stop_token_ids":[', b'"a"', b"]}")),
    "a bias for everything": (
        COMPLETIONS,
        b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % number for number in range(500_000)) + b"}}",
    ),
    "fields without end": (
        COMPLETIONS,
        b'{"prompt":"x",' + b",".join(b'"a%d":1' % number for number in range(500_000)) + b"}",
    ),
    "a field with a long name": (COMPLETIONS, b'{"prompt":{},"' + b"a" * (MOST_BODY_BYTES - 30) + b'":1}'),
    "messages without end": (CHAT, filled(b'{"messages":[', b'{"role":"user","content":"a"}', b"]}")),
    "wrong messages without end": (CHAT, filled(b'{"messages":[', b"1", b"]}")),
    "parts without end": (
        CHAT,
        filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}"),
    ),
    "a role with a long name": (
        CHAT,
        b'{"messages":[{"role":"' + b"a" * (MOST_BODY_BYTES - 60) + b'","content":"a"}]}',
    ),
    "brackets": (COMPLETIONS, b"[" * MOST_BODY_BYTES),
    "nested deeply": (COMPLETIONS, b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}"),
    "input of a response without end": (
        "/v1/responses",
        filled(b'{"input":[', b'{"role":"user","content":"a"}', b"]}"),
    ),
    "tokens to be told without end": ("/detokenize", filled(b'{"tokens":[', b"4294967295", b"]}")),
}


@pytest.fixture(scope="module")
def most_cpu_s() -> float:
    """Most processor seconds of a request on this machine."""
    _, body = LARGE["messages without end"]
    began_s = time.process_time()
    json.loads(body)
    return MOST_COST * (time.process_time() - began_s)


@pytest.mark.parametrize("name", LARGE)
async def test_the_largest_bodies_are_refused_at_little_cost_and_in_few_words(
    front: Front, expected: list[int], name: str, most_cpu_s: float
) -> None:
    path, body = LARGE[name]
    assert len(body) <= MOST_BODY_BYTES
    async with undisturbed(front, expected):
        before_s = front.busy_s()
        status, answer = await front.answer(post(path, body))
        busy_s = front.busy_s() - before_s
    error = json.loads(answer)["error"]
    assert 400 <= status < 500, error
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(answer) <= MOST_ANSWER_BYTES
    assert busy_s <= most_cpu_s


ODD: dict[str, tuple[bytes, set[int]]] = {
    "a number beyond all": (post(COMPLETIONS, b'{"prompt":"x","temperature":1e999}'), {400}),
    "a seed beyond all": (post(COMPLETIONS, b'{"prompt":"x","seed":1' + b"0" * 400 + b"}"), {400}),
    "half of a character": (post(COMPLETIONS, b'{"prompt":"\\ud800"}'), {400}),
    "bytes that are no text": (post(COMPLETIONS, b'{"prompt":"\xc3\x28\xff"}'), {400}),
    "a body that never ends": (chunked(COMPLETIONS, 2 * MOST_BODY_BYTES), {0, 413}),
    "a length beyond all": (
        post(COMPLETIONS, b"{}").replace(b"content-length: 2", b"content-length: " + b"9" * 18),
        {413},
    ),
    "a length that is no number": (post(COMPLETIONS, b"{}").replace(b"length: 2", b"length: two"), {400}),
    "a length below nothing": (post(COMPLETIONS, b"{}").replace(b"length: 2", b"length: -2"), {400}),
    "two lengths": (post(COMPLETIONS, b"{}", b"content-length: 40"), {400}),
    "a length and chunks": (post(COMPLETIONS, b"{}", b"transfer-encoding: chunked"), {400}),
    "chunks of no size": (
        post(COMPLETIONS, b"zz\r\n").replace(b"content-length: 4", b"transfer-encoding: chunked"),
        {400},
    ),
    "a path that is no text": (b"GET /v1/models/%ff%fe%00 HTTP/1.1\r\nhost: x\r\n\r\n", {400, 404}),
    "a path without end": (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", {404, 431}),
    "a header without end": (b"GET /version HTTP/1.1\r\nhost: x\r\na: " + b"a" * 1_000_000, {0, 431}),
    "headers without end": (b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200_000, {0, 400, 431}),
    "a key that is no text": (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xff\xfe\r\n\r\n",
        {200, 400, 401},
    ),
    "an id with a line break in it": (b"GET /version HTTP/1.1\r\nhost: x\r\nx-request-id: a\rb\r\n\r\n", {200, 400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "a handshake of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), {400}),
    "an unknown method": (b"BREW /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", {400, 405}),
    "another version": (b"GET /version HTTP/9.9\r\nhost: x\r\n\r\n", {400}),
    "another protocol": (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        {200, 400},
    ),
}


@pytest.mark.parametrize("name", ODD)
async def test_what_is_hardly_http_is_refused_or_the_connection_ends(
    front: Front, expected: list[int], name: str, most_cpu_s: float
) -> None:
    data, statuses = ODD[name]
    before_s = front.busy_s()
    status, answer = await front.answer(data)
    assert status in statuses, answer
    assert front.busy_s() - before_s <= most_cpu_s
    if status >= 400 and answer:
        assert json.loads(answer)["error"].keys() == {"message", "type", "param", "code"}
        assert len(answer) <= MOST_ANSWER_BYTES
    async with front.http() as client:
        assert (await client.get("/version")).status_code == 200


async def test_connections_that_say_nothing_or_half_of_it_are_no_trouble_to_others(
    front: Front, expected: list[int]
) -> None:
    idle, half = 600, 200
    async with undisturbed(front, expected):
        quiet = [await asyncio.open_connection(front.host, front.port) for _ in range(idle)]
        for _, writer in quiet[:half]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
        for reader, writer in quiet[half : 2 * half]:  # They keep their connection, and have nothing more to say.
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with front.http() as client:
            assert (await client.get("/version")).status_code == 200
        # Those that have not sent all headers in time are closed, those that say nothing among them.
        for reader, _ in [*quiet[:half], *quiet[2 * half :]]:
            assert await reader.read() == b""
        for reader, writer in quiet[half : 2 * half]:
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await reader.readuntil(b'"}HTTP/1.1 200')
        for _, writer in quiet:
            writer.close()
