"""What the loop of an engine process needs of a target or a draft: a role over its sessions, and its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from specdec.v1 import common_pb2 as pb
from specdec.worker.sessions import Owner, Session


class Role(Protocol):
    """What a target or a draft does with sessions; the loop does the rest."""

    def open(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> Session:
        """Make a session; raises SessionFailure."""

    def position(self, session: Session) -> int:
        """Number of tokens held."""

    def entry(self, session: Session, kind: str, body: Any) -> None:
        """Any entry but open and close; raises SessionFailure."""

    def owner_message(self, owner: Owner, message: Any) -> None:
        """What a frame says besides its entries."""

    def close(self, session: Session) -> None:
        """Free what the session holds."""

    def set_orphaned(self, session: Session, orphaned: bool) -> None:
        """The owner's stream broke, or is back."""

    def resend(self, session: Session, committed_length: int) -> None:
        """Emit again what the owner has not seen."""

    def wait_s(self, now_s: float) -> float | None:
        """0: a step is due; positive: not before then; None: nothing to do until a frame arrives."""

    def step(self) -> None:
        """Run one step and emit what it decided."""

    def load(self) -> pb.LoadReport:
        """How loaded the replica is; also the moment to export gauges."""


@dataclass(frozen=True)
class Wire:
    """The message types of one role's stream."""

    request: type[Any]
    response: type[Any]
    result: type[Any]
    span_name: str = "session"
    """Of a session that is traced, and of its last phase, after queue and prefill."""
    last_phase: str = "decode"
