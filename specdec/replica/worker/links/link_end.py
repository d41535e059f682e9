"""Common to both ends of a link: streams come and go, frames are read entry by entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic

import structlog

from specdec.replica.bridge.frames import EnginePort
from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.links.streams import LinkStreams
from specdec.replica.worker.role import Role
from specdec.replica.worker.sessions import SessionT
from specdec.v1 import common_pb2 as pb
from specdec.wire.parsing.parts import MalformedFrame, read_frame

_MOST_ID_CHARS = 512
"""Characters of a session's id, which answers repeat."""
LEAST_KEY_BYTES = 16
"""Bytes of a grant's key, at least: a key cannot be guessed."""


class LinkEnd(ABC, Generic[SessionT]):
    """One end's links. A fault in them costs a link, never a session."""

    def __init__(
        self,
        port: EnginePort,
        host: SessionHost[SessionT],
        role: Role[SessionT],
        fail: Callable[[SessionT, SessionFailure], None],
        clock: Callable[[], float],
    ) -> None:
        """`fail` ends a session at role and host."""
        self._port = port
        self._host = host
        self._role = role
        self._fail = fail
        self._clock = clock
        self.streams = LinkStreams(port, host.responses.limits)
        """The open streams."""
        self._log = structlog.get_logger("specdec.replica.worker")
        host.links = self

    # --- sessions, called by loop and host

    @abstractmethod
    def granted(self, session: SessionT, grant: pb.LinkGrant) -> None:
        """The coordinator grants the session's link, in place of a former grant."""

    @abstractmethod
    def takes(self, session: SessionT, body: dict[str, Any]) -> bool:
        """Before a result goes to the coordinator; True: it went another way."""

    @abstractmethod
    def ended(self, session: SessionT) -> None:
        """The session is closed."""

    def before_entry(self, session: SessionT) -> int:
        """The coordinator sends an entry; returns the position before it, for `after_entry`."""
        return 0

    def after_entry(self, session: SessionT, position: int) -> None:
        """The coordinator's entry was handled."""
        return

    # --- streams

    def message(self, stream_id: int, payload: bytes) -> Iterator[None]:
        """Handle a frame of a stream, entry by entry; what comes after the stream's end is dropped."""
        if not self.streams.is_open(stream_id):
            return
        try:
            frame = read_frame(pb.LinkFrame, payload)
        except MalformedFrame as error:
            self._abort(stream_id, "MALFORMED_MESSAGE", str(error))
            return
        if frame.HasField("hello"):
            self.streams.greeted(stream_id, frame.hello)
            self._greeted(stream_id, frame.hello)
        for entry in frame.entries:
            if len(entry.session_id) > _MOST_ID_CHARS:
                message = f"session_id: {len(entry.session_id)} characters exceed the limit of {_MOST_ID_CHARS}"
                self._abort(stream_id, "MALFORMED_MESSAGE", message)
            elif not self._is_handled(stream_id, entry) and self.streams.is_flooded(stream_id):
                self._abort(stream_id, "TOO_MANY_STRAYS", "too many entries of sessions that are not joined")
            if not self.streams.is_open(stream_id):
                return
            yield
        self._host.steps.work()

    def _is_handled(self, stream_id: int, entry: pb.LinkEntry) -> bool:
        session = self._host.sessions.get(entry.session_id)
        try:
            if session is not None:
                self._host.steps.work_on([session.key])
            return self._entry(stream_id, session, entry)
        except Exception as error:
            self._host.faults.note(error)
            self._abort(stream_id, "INTERNAL", "an entry could not be handled")
            return True

    def closed(self, stream_id: int, reason: str) -> None:
        """A stream has ended."""
        self.streams.closed(stream_id)
        self._left(stream_id, reason or "the link ended")

    def flush(self) -> None:
        """Send what is queued."""
        for stream_id in self.streams.flush():
            self._abort(stream_id, "STREAM_NOT_READ", "the peer does not read")

    def _abort(self, stream_id: int, reason: str, message: str) -> None:
        self._log.warning("link_aborted", stream_id=stream_id, reason=reason, message=message)
        self.streams.abort(stream_id, reason, message)
        self._left(stream_id, message)

    def _greeted(self, stream_id: int, hello: pb.LinkHello) -> None:
        """The peer said hello."""
        return

    @abstractmethod
    def _entry(self, stream_id: int, session: SessionT | None, entry: pb.LinkEntry) -> bool:
        """Handle an entry; False if its session is not joined on this stream."""

    @abstractmethod
    def _left(self, stream_id: int, reason: str) -> None:
        """All sessions of a stream that is gone leave it."""
