"""Anyone to the metrics port: what is no HTTP, or no request that a scraper makes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Counter

from specdec.service.metrics_endpoint import metrics_endpoint
from specdec.service.settings import ServiceSettings
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints, require

_MOST_S = 5.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_NO_FAULT = {"200", "400", "405", "414", "431", "501", "505"}
_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS", b"CONNECT", b"get", b"", b"G" * 70_000, b"\0", b"PRI")
_PATHS = (
    b"/metrics", b"/", b"", b"*", b"//", b"/%", b"/%ff%00", b"/metrics?name[]=specdec_fuzz_total", b"/metrics?name[]=",
    b"/metrics?name[]=x&name[]=y&" * 500, b"/metrics?%ff=%ff", b"/favicon.ico", b"/../../etc/passwd", b"http://x:y/",
    b"/" + b"a" * 70_000, b"/\xff\xfe", b"/m\tx",
)  # fmt: skip
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9", b"HTTP/1.-1", b"HTTP/1.1.1", b"", b"\xff")
_HEADERS = (b"Accept", b"Accept-Encoding", b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect",
            b"Content-Type", b"X", b"", b"\xff", b"Accept ", b"A" * 70_000)  # fmt: skip
_VALUES = (
    b"application/openmetrics-text; version=1.0.0", b"application/openmetrics-text; version=x; escaping=allow-utf-8",
    b"application/openmetrics-text; version=", b"application/openmetrics-text; version=1.0.0\r\n\tX: y",
    b"text/plain; version=1.0.0; escaping=values", b"text/plain; version=\xff", b"text/plain;version=99999999999999.1",
    b"gzip", b"gzip;q=0", b"br", b"chunked", b"-1", b"1", b"99999999999999999999", b"keep-alive", b"upgrade",
    b"", b",", b";" * 3000, b"\0", b"\xff" * 40, b"multipart/form-data", b"a" * 70_000,
)  # fmt: skip
_OTHERS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\x00" * 160,
    b"\0" * 10_000, b"\n" * 10_000, b"\r\n\r\n", b"A" * 200_000, b"GET /metrics\r\n\r\n", b"GET", b"",
)  # fmt: skip


def request(rng: random.Random) -> bytes:
    """A request that is wrong somewhere."""
    if rng.random() < 0.1:
        return rng.choice(_OTHERS)
    method, path, version = b"GET", b"/metrics", b"HTTP/1.1"
    headers = [(b"Host", b"x"), (b"Accept", b"text/plain"), (b"Accept-Encoding", b"gzip")]
    kind = rng.randrange(6)
    if kind == 0:
        method = rng.choice(_METHODS)
    elif kind == 1:
        path = rng.choice(_PATHS)
    elif kind == 2:
        version = rng.choice(_VERSIONS)
    elif kind == 3:
        headers += [(rng.choice(_HEADERS), rng.choice(_VALUES)) for _ in range(rng.choice([1, 1, 2, 300]))]
    headers = [(name, rng.choice(_VALUES) if kind == 4 else value) for name, value in headers]
    end = b"\n" if rng.random() < 0.1 else b"\r\n"
    lines = [b" ".join([method, path, version]), *(name + b": " + value for name, value in headers)]
    data = end.join([*lines, b"", b""])
    if kind == 5:
        spoilt = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        data = bytes(spoilt[: rng.choice([len(spoilt), rng.randrange(1, len(spoilt))])])
    return data


def exchange(port: int, data: bytes) -> bytes:
    """What the port answers, till it closes; it is told that nothing follows."""
    with socket.create_connection(("127.0.0.1", port), _MOST_S) as connection:
        answer = bytearray()
        with contextlib.suppress(OSError):  # it need not read what it refuses
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        return bytes(answer)


def scrape(port: int) -> bytes:
    """The page, as a scraper asks for it."""
    return exchange(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n")


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """The endpoint in this process; nothing may be written where operators look."""
    registry = CollectorRegistry()
    Counter("specdec_fuzz", "Counts.", registry=registry).inc(3)
    settings = ServiceSettings(host="127.0.0.1", metrics_port=0)
    written = io.StringIO()
    with contextlib.redirect_stderr(written), metrics_endpoint(settings, registry) as port:
        assert port is not None

        async def run(case: Case) -> None:
            data = case.sent(request(case.rng))
            case.what.append(f"{data[:200]!r} of {len(data)} bytes")
            answer = await asyncio.to_thread(exchange, port, data)
            status = _STATUS.match(answer)
            is_plain = status is None or status[1].decode() in _NO_FAULT
            require(is_plain, f"the answer is {answer[:100]!r}")
            said = written.getvalue()
            written.seek(0)
            written.truncate(0)
            require(not said, f"on standard error: {said[-300:]}")
            require(b"specdec_fuzz_total 3.0" in await asyncio.to_thread(scrape, port), "the next scrape failed")

        yield run


LINK = Link("metrics", opened)
