"""An endpoint that answers every completion with the same bytes, such as malformed or endless ones."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
_MOST_BYTES = 64 * 2**20


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def said(text: str) -> bytes:
    return event(b'{"choices":[{"text":"' + text.encode() + b'","finish_reason":null}]}')


@dataclass
class FixedApi:
    """URL of the endpoint, and its requests."""

    url: str
    requests: list[bytes] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    """Set when a client closes its connection during an answer."""


@contextmanager
def fixed_api(answer: bytes, *, repeats: bytes = b"", stays: bool = False) -> Iterator[FixedApi]:
    """Serve `answer`, then `repeats` until the client leaves; `stays`: keep the connection open in silence after it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        api = FixedApi(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        thread = threading.Thread(target=_accept, args=(listener, api, answer, repeats, stays), daemon=True)
        thread.start()
        yield api
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def _accept(listener: socket.socket, api: FixedApi, answer: bytes, repeats: bytes, stays: bool) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, api, answer, repeats, stays), daemon=True).start()


def _serve(connection: socket.socket, api: FixedApi, answer: bytes, repeats: bytes, stays: bool) -> None:
    with connection, suppress(OSError):
        api.requests.append(_request(connection))
        connection.sendall(answer)
        for _ in range(_MOST_BYTES // len(repeats) if repeats else 0):
            try:
                connection.sendall(repeats)
            except OSError:
                api.hung_up.set()
                raise
        if stays and not connection.recv(1):
            api.hung_up.set()


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body
