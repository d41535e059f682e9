"""The messages of a stream to a replica, role by role: the same exchange, in messages of different types."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from specdec.v1 import common_pb2 as pb


class Entry(Protocol):
    """What a replica is told of one session."""

    @property
    def session_id(self) -> str:
        """Of which session."""

    @property
    def epoch(self) -> int:
        """Of which of its openings there."""

    def ByteSize(self) -> int:  # noqa: N802
        """As protobuf has it."""


class Result(Protocol):
    """What a replica tells of one session."""

    @property
    def session_id(self) -> str:
        """Of which session."""

    @property
    def epoch(self) -> int:
        """Of which of its openings here."""


RequestT = TypeVar("RequestT", bound=Message)
"""A frame to the replica."""
EntryT = TypeVar("EntryT", bound="Entry")
"""What a frame to the replica has of one session."""
ResultT = TypeVar("ResultT", bound=Result)
"""What a frame from the replica has of one session."""
ResultT_contra = TypeVar("ResultT_contra", bound=Result, contravariant=True)
_RequestT_contra = TypeVar("_RequestT_contra", bound=Message, contravariant=True)
_ResultT_co = TypeVar("_ResultT_co", bound=Result, covariant=True)


class Frame(Protocol[_ResultT_co]):
    """A frame from a replica."""

    @property
    def attached(self) -> pb.Attached:
        """The answer to the attach; in the first frame only."""

    @property
    def results(self) -> Iterable[_ResultT_co]:
        """In the order in which they came about."""

    @property
    def load(self) -> pb.LoadReport:
        """The replica's load; not in each frame."""

    def HasField(self, field_name: Literal["attached", "load"]) -> bool:  # noqa: N802
        """As protobuf has it."""


class Call(Protocol[_RequestT_contra]):
    """A call of grpc.aio that streams in both directions; see `grpc.aio.StreamStreamCall`."""

    async def write(self, request: _RequestT_contra) -> None:
        """Send a frame."""

    async def read(self) -> object:
        """The next frame, or grpc.aio.EOF."""

    async def done_writing(self) -> None:
        """No frame follows."""

    def cancel(self) -> bool:
        """Break the stream."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call back with this call when it has ended."""


class Wire(Protocol[RequestT, EntryT]):
    """How to call replicas of one role. Frames that `open` reads are `Frame`s of the role's results."""

    def info(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """Ask which process it is."""

    def open(self, channel: grpc.aio.Channel) -> Call[RequestT]:
        """Call the method that streams."""

    def attach(self, attach: pb.Attach) -> RequestT:
        """The first frame."""

    def frame(self, entries: Sequence[EntryT]) -> RequestT:
        """Every other frame: these entries, and little besides (see `specdec.wire.message_sizes.frame_bytes`)."""

    def close_entry(self, session_id: str, epoch: int, reason: str) -> EntryT:
        """The entry that ends a session."""
