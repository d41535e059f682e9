"""Protocols of a stream to a replica: targets and drafts have one exchange, in different message types."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from specdec.v1 import common_pb2 as pb


class Entry(Protocol):
    """One session's part of a frame to a replica."""

    @property
    def session_id(self) -> str:
        """The session's id."""

    @property
    def epoch(self) -> int:
        """The session's epoch at the replica."""

    def ByteSize(self) -> int:  # noqa: N802
        """Protobuf's method."""


class Result(Protocol):
    """One session's part of a frame from a replica."""

    @property
    def session_id(self) -> str:
        """The session's id."""

    @property
    def epoch(self) -> int:
        """The session's epoch at the replica."""


RequestT = TypeVar("RequestT", bound=Message)
"""A frame to a replica."""
EntryT = TypeVar("EntryT", bound="Entry")
ResultT = TypeVar("ResultT", bound=Result)
ResultT_contra = TypeVar("ResultT_contra", bound=Result, contravariant=True)
_RequestT_contra = TypeVar("_RequestT_contra", bound=Message, contravariant=True)
_ResultT_co = TypeVar("_ResultT_co", bound=Result, covariant=True)


class ResultFrame(Protocol[_ResultT_co]):
    """A frame from a replica."""

    @property
    def attached(self) -> pb.Attached:
        """The answer to the attach; in the first frame only."""

    @property
    def results(self) -> Iterable[_ResultT_co]:
        """Results in the order in which they arose."""

    @property
    def load(self) -> pb.LoadReport:
        """The replica's load; not in every frame."""

    def HasField(self, field_name: Literal["attached", "load"]) -> bool:  # noqa: N802
        """Protobuf's method."""


class BidiCall(Protocol[_RequestT_contra]):
    """A call of grpc.aio that streams in both directions; see `grpc.aio.StreamStreamCall`."""

    async def write(self, request: _RequestT_contra) -> None:
        """Send a frame."""

    async def read(self) -> object:
        """The next frame, or grpc.aio.EOF."""

    async def done_writing(self) -> None:
        """End our side of the stream."""

    def cancel(self) -> bool:
        """Break the stream."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with this call when it has ended."""


class LinkWire(Protocol[RequestT, EntryT]):
    """Messages and calls of one role. The calls of `open` read `ResultFrame`s of the role's results."""

    def info(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """Ask for the replica's info."""

    def info_as_other(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """Ask for the info of a replica of the other role."""

    def open(self, channel: grpc.aio.Channel) -> BidiCall[RequestT]:
        """Begin the streaming call."""

    def attach(self, attach: pb.Attach) -> RequestT:
        """Make the first frame."""

    def frame(self, entries: Sequence[EntryT]) -> RequestT:
        """Make a later frame: these entries, and little else (see `specdec.wire.message_sizes.frame_bytes`)."""

    def close_entry(self, session_id: str, epoch: int, reason: str) -> EntryT:
        """Make the entry that ends a session."""
