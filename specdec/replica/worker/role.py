"""What the loop of an engine process needs of a target or a draft: a role over its sessions, and its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.replica.bridge.engine_answers import CallHandler
from specdec.replica.worker.sessions import Owner, SessionT
from specdec.v1 import common_pb2 as pb


class DuringPass(Protocol):
    """What the loop does for a role while a device computes its pass."""

    def send_results(self) -> None:
        """Send what has been decided."""

    def take_frames(self, until_s: float, is_done: Callable[[], bool]) -> None:
        """Handle what has arrived, and what arrives until a time (monotonic) or until the device is done."""


class Role(Protocol[SessionT]):
    """What a target or a draft does with sessions of its own kind; the loop does the rest (`loop.py` has the order)."""

    calls: CallHandler | None = None
    """Answers calls beside the streams of sessions; None: such calls are refused."""

    def open(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> SessionT:
        """Make a session; raises SessionFailure."""

    def position(self, session: SessionT) -> int:
        """Number of tokens held."""

    def entry(self, session: SessionT, kind: str, body: Any) -> None:
        """Any entry but open and close; raises SessionFailure."""

    def owner_message(self, owner: Owner, message: Any) -> None:
        """What a frame says besides its entries."""

    def close(self, session: SessionT) -> None:
        """Free what the session holds."""

    def update_pause(self, session: SessionT) -> None:
        """Whether it may step has changed: see `EngineSession.may_step`."""

    def resend(self, session: SessionT, seen: pb.AttachedSession) -> None:
        """Emit again what the owner has not seen; raises SessionFailure when that is not held any more."""

    def absorb_proposals(self, now_s: float) -> None:
        """Take what has arrived for the next step into account, and decide what that step waits for."""

    def wait_s(self, now_s: float) -> float | None:
        """0: a step is due; positive: not before then; None: nothing to do until a frame arrives. Changes nothing."""

    def step(self, during: DuringPass, /) -> None:
        """Run one step and emit what it decided."""

    def before_send(self) -> None:
        """Owners are told next what was decided."""
        return

    def load(self) -> pb.LoadReport:
        """How loaded the replica is; also the moment to export gauges."""


@dataclass(frozen=True)
class Wire:
    """The message types of one role's stream."""

    request: type[Any]
    response: type[Any]
    result: type[Any]
    span_name: str = "session"
    """Of a session that is traced."""
    last_phase: str = "decode"
    """Name of the last phase of such a span, after queue and prefill."""
