"""uvicorn's protocol, with limits for clients that send headers slowly or too large, and answers that arrive."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specdec.gateway.http.heads import BYTES_PER_HEADER, MOST_HEADER_BYTES, NOT_HTTP, TOO_LARGE, refusal_of, with_path

_UPGRADE = b"upgrade"
_FRAMING_PER_BYTE = 8
"""Bytes of framing per byte of body, at most: for chunks of one byte, with a margin."""
_SEND_BYTES = 128 * 1024
"""Bytes of the kernel's buffer for a connection, which bounds what is on its way to a fast reader."""
_UNSENT_BYTES = 16 * 1024
"""Bytes that wait in the kernel for a connection's reader, at most, about: the time-out for readers does not see them,
and for a client that reads nothing each byte is made in vain."""
_MOST_WAITING = 64
"""Requests of a connection that wait for the answers to earlier ones, at most; clients that pipeline send some ten."""
_MOST_DROPPED_BYTES = 64 * 1024 * 1024
"""Bytes read and dropped of a client that sends on after its answer, at most."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An answer that clients skip, and that resets a connection which its client has left."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 1.0
"""Seconds to the next look at a client that sends no more, at first and at last."""
_TCP_CLOSE = 7
"""The kernel's state of a connection that was reset."""


class _Refused(Exception):
    """Ends the parsing of a refused request."""


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """Send an answer of unknown length as HTTP/1.0 knows it: without chunks, up to the connection's end."""
    send = cycle.send

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_plain  # type: ignore[method-assign]


def _leave_if_unread(cycle: RequestResponseCycle, leave: Callable[[], None]) -> None:
    """Leave the connection after an answer to a request whose body has not ended, such as one that is too large."""
    send = cycle.send

    async def send_and_leave(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and cycle.more_body:
            cycle.keep_alive = False  # the client is told to send its next request elsewhere
        leaves = message["type"] == "http.response.body" and not message.get("more_body", False) and cycle.more_body
        if leaves:
            cycle.keep_alive = True  # the headers are sent, and `leave` ends the connection
        await send(message)
        if leaves:
            leave()

    cycle.send = send_and_leave  # type: ignore[method-assign]


def protocol_class(header_s: float, reader_stall_s: float) -> type[HttpToolsProtocol]:
    """A protocol that closes connections whose headers are not complete within `header_s`.

    The time runs from the connection's start, and from the first byte of each request after the first.
    """

    class BoundedProtocol(HttpToolsProtocol):
        """Bounds the time of headers, the bytes of headers, chunk frames and trailers, and the requests that wait."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._header_timer: asyncio.TimerHandle | None = None
            self._stall_timer: asyncio.TimerHandle | None = None
            self._num_unread = 0
            self._num_bytes = 0
            self._in_headers = True
            self._unanswered: deque[RequestResponseCycle] = deque()
            """Requests without a whole answer, the one that is being answered first."""
            self._end_timer: asyncio.TimerHandle | None = None
            """Of the next look at a client that sends no more."""
            self._num_dropped: int | None = None
            """Bytes that came after the last answer; None: the connection is not left."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if (connection := transport.get_extra_info("socket")) is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            self._arm()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader()

        def resume_writing(self) -> None:
            self._forget_reader()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self._forget_reader()
            if self._end_timer is not None:
                self._end_timer.cancel()
            for cycle in self._unanswered:
                cycle.disconnected, cycle.body = True, bytearray()
                cycle.message_event.set()
            self._unanswered.clear()
            self.pipeline.clear()
            super().connection_lost(exc)

        def eof_received(self) -> bool:  # type: ignore[override]
            """A client that sends no more has left, or waits for its answers: whether it may be waiting."""
            may_wait = self._is_answering and not self.cycle.more_body and self.scope["http_version"] == "1.1"
            may_wait = may_wait and self.transport.can_write_eof()
            if may_wait:
                self._look_at_end(_FIRST_LOOK_S, _INTERIM)
            return may_wait

        def _look_at_end(self, wait_s: float, interim: bytes) -> None:
            """Abort if the client has left, which only sending shows."""
            info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if info[0] == _TCP_CLOSE:
                self.transport.abort()
                return
            if interim and self._unanswered and not self._unanswered[0].response_started:
                self.transport.write(interim)
                interim = b""
            later_s = min(2 * wait_s, _LAST_LOOK_S)
            self._end_timer = self.loop.call_later(wait_s, self._look_at_end, later_s, interim)

        def on_response_complete(self) -> None:
            if self._unanswered:
                self._unanswered.popleft()
            super().on_response_complete()
            if self._end_timer is not None and not self._is_answering:
                self.transport.close()

        def data_received(self, data: bytes) -> None:
            if self._num_dropped is not None:
                self._num_dropped += len(data)
                if self._num_dropped > _MOST_DROPPED_BYTES:
                    self.transport.abort()
                return
            self._num_bytes += len(data)
            self._unset_keepalive_if_required()
            try:
                self._feed(data)
            except httptools.HttpParserError:
                self.send_400_response("")
            if self._num_bytes > MOST_HEADER_BYTES and not self._is_ending:
                self._refuse(TOO_LARGE)
            if self._header_timer is None and not self._is_answering:
                self._arm()  # line breaks begin no request, and end the time of an idle connection

        def _feed(self, data: bytes) -> None:
            """Parse. Offers of other protocols (Java's client offers HTTP/2 with each request) are not taken.

            The parser leaves out the body of a request with an offer, so it reads the request again without.
            """
            while True:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    if not self._has_offer:
                        return
                    version = self.parser.get_http_version().encode()
                    head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
                    head += [name + b": " + value for name, value in self.headers if name != _UPGRADE]
                    data = b"\r\n".join([*head, b"", data[offer.args[0] :]])
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

        @property
        def _has_offer(self) -> bool:
            """Whether the request is read again."""
            return self.parser.should_upgrade() and any(name == _UPGRADE for name, _ in self.headers)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._num_bytes += BYTES_PER_HEADER
            if self._in_headers:  # a trailer is no header: proxies that remove headers let it pass
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._num_bytes = max(0, self._num_bytes - _FRAMING_PER_BYTE * len(body))
            super().on_body(body)

        def on_message_complete(self) -> None:
            if self._has_offer:
                return
            self._num_bytes = 0
            super().on_message_complete()

        def on_message_begin(self) -> None:
            self._in_headers = True
            if self._header_timer is None:
                self._arm()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._disarm()
            self.url = with_path(self.url)
            if (refusal := refusal_of(self.parser.get_http_version(), self.headers)) is not None:
                self._refuse(refusal)
                raise _Refused
            if self._has_offer:
                return
            if len(self._unanswered) > _MOST_WAITING:
                self._unanswered[-1].keep_alive = False  # its answer tells where the connection ended
                self._num_dropped = 0
                raise _Refused
            self._in_headers, self._num_bytes = False, 0
            super().on_headers_complete()
            self._unanswered.append(self.cycle)
            _leave_if_unread(self.cycle, self._leave)
            if self.scope["http_version"] == "1.0":
                _end_by_closing(self.cycle)

        def send_400_response(self, msg: str) -> None:
            if not self._is_ending:
                self.transport.write(NOT_HTTP)
                self._leave()

        def _refuse(self, answer: bytes) -> None:
            if self._in_headers:
                self.transport.write(answer)
            self._leave()

        @property
        def _is_answering(self) -> bool:
            return bool(self.cycle) and not self.cycle.response_complete

        @property
        def _is_ending(self) -> bool:
            return self._num_dropped is not None or self.transport.is_closing()

        def _leave(self) -> None:
            """End a connection so that the client has its answer: closing while bytes arrive would reset it.

            What still arrives is dropped, until the client closes too, for `header_s` at most.
            """
            self._unset_keepalive_if_required()
            if self._is_answering or not self.transport.can_write_eof():  # TLS says by itself that it ends
                self.transport.close()
            elif not self._is_ending:
                self._num_dropped = 0
                self.transport.write_eof()
                self._disarm()
                self._arm()

        def _watch_reader(self) -> None:
            self._num_unread = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(reader_stall_s, self._look_at_reader)

        def _look_at_reader(self) -> None:
            """Cut off a client that has read nothing since the last look: its requests are cancelled."""
            if self.transport.get_write_buffer_size() < self._num_unread:
                self._watch_reader()
            else:
                self.transport.abort()

        def _forget_reader(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def _arm(self) -> None:
            self._header_timer = self.loop.call_later(header_s, self._too_slow)

        def _disarm(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _too_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
