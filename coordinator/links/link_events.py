"""A link's settings, states and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from specdec.coordinator.links.stream_end import EndOfStream
from specdec.coordinator.sessions.session import Session
from specdec.v1 import common_pb2 as pb

Link = TypeVar("Link", contravariant=True)


class LinkState(StrEnum):
    """A replica's state as the coordinator sees it. Its stream is up in the states READY to PROBATION."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"
    PROBATION = "probation"
    INCOMPATIBLE = "incompatible"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Settings shared by all links of a coordinator. Times in seconds."""

    owner_id: str
    """The coordinator's name at replicas: a new stream of one owner ends its former stream."""
    lease_generation: int
    connect_timeout_s: float
    """Time-out of each of the two round trips that open a stream."""
    backoff_min_s: float
    """Wait after the first failure to connect; doubles with each further failure."""
    backoff_max_s: float
    max_message_bytes: int = 16 * 2**20
    """This coordinator's message limit, assumed also of replicas that report none."""
    grants_links: bool = True
    """Whether drafts and targets may talk directly."""


class LinkEvents(Protocol[Link]):
    """Events of all links of one role. Called in the reader's task; methods raise only where stated."""

    def check_instance(self, link: Link, instance_id: str) -> None:
        """The replica named its process; raises IncompatibleReplica if another link leads to it."""

    async def check_identity(self, link: Link, identity: pb.ModelIdentity) -> None:
        """The replica named its model; raises IncompatibleReplica if it cannot be used."""

    def on_up(self, link: Link, lost: Sequence[Session]) -> None:
        """The stream is ready; `lost` are the link's sessions that the replica does not hold."""

    def on_down(self, link: Link, end: EndOfStream) -> None:
        """The stream ended; the link still has its sessions. An announced end is no fault of the replica."""

    def on_state(self, link: Link) -> None:
        """The state changed."""

    def on_load(self, link: Link) -> None:
        """A load report came."""

    def on_session_error(self, link: Link, session: Session, error: pb.SessionError) -> None:
        """The replica ended a session."""

    def on_too_large(self, link: Link, session: Session, cause: str) -> None:
        """A session's entry exceeds the replica's message limit, and was not sent."""

    def on_closed(self, link: Link, session: Session, reason: str) -> None:
        """We closed a session; its state for this link's role is still there."""

    def on_fault(self, link: Link, session: Session, error: Exception) -> None:
        """The handler of a session's result raised."""
