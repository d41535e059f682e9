"""What a link is made with, the states it can be in, and what it tells."""

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
    """A replica as the coordinator sees it. From ready to probation its stream is up."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"
    PROBATION = "probation"
    INCOMPATIBLE = "incompatible"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What all links of a coordinator have in common. Times in seconds."""

    owner_id: str
    """Whose sessions they are, to the replicas: a stream of the same owner ends the one before it."""
    lease_generation: int
    connect_timeout_s: float
    """For each of the two round trips until a stream is up."""
    backoff_min_s: float
    """The wait after the first failure to connect; it doubles with each further one."""
    backoff_max_s: float
    max_message_bytes: int = 16 * 2**20
    """What we take. Replicas that do not tell what they take are believed to take as much."""


class LinkEvents(Protocol[Link]):
    """What links of one role tell those who care for its replicas. Called in the reader; raises only where stated."""

    def check_instance(self, link: Link, instance_id: str) -> None:
        """A replica says which process it is; raises IncompatibleReplica if another link leads to it."""

    async def check_identity(self, link: Link, identity: pb.ModelIdentity) -> None:
        """A replica says what it serves; raises IncompatibleReplica if it cannot be used."""

    def on_up(self, link: Link, lost: Sequence[Session]) -> None:
        """The stream is ready; `lost` are the link's sessions that the replica does not hold."""

    def on_down(self, link: Link, end: EndOfStream) -> None:
        """The stream ended; the link still has its sessions. A replica that shut down in order is not at fault."""

    def on_state(self, link: Link) -> None:
        """The state changed."""

    def on_load(self, link: Link) -> None:
        """A load report came."""

    def on_session_error(self, link: Link, session: Session, error: pb.SessionError) -> None:
        """The replica ended a session."""

    def on_too_large(self, link: Link, session: Session, cause: str) -> None:
        """The replica takes no message that holds what was to be sent of a session. Nothing was sent."""

    def on_closed(self, link: Link, session: Session, reason: str) -> None:
        """A session is closed from our side; what the session knows of its side at the link is still there."""

    def on_fault(self, link: Link, session: Session, error: Exception) -> None:
        """Handling a session's entry failed on our side."""
