"""Protocols between an engine process's loop and its role, target or draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A target's or draft's work on its own kind of sessions; the loop does the rest (`loop.py` shows the order)."""

    calls: CallHandler | None = None
    """Answers calls beside the streams of sessions; None: such calls are refused."""

    def open_session(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> SessionT:
        """Make a session; raises SessionFailure."""

    def position(self, session: SessionT) -> int:
        """Number of tokens held."""

    def token_ids(self, session: SessionT) -> Sequence[int]:
        """A target's committed tokens, prompt included; drafts are not asked."""
        return ()

    def entry(self, session: SessionT, kind: str, body: Any) -> None:
        """Any entry but open and close; raises SessionFailure."""

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Handle a frame's fields besides its entries."""

    def close_session(self, session: SessionT) -> None:
        """Free what the session holds."""

    def update_pause(self, session: SessionT) -> None:
        """`EngineSession.may_step` of a session has changed."""

    def resend(self, session: SessionT, seen: pb.AttachedSession) -> None:
        """Emit again the results that the owner has not seen; raises SessionFailure if they are lost."""

    def absorb_proposals(self, now_s: float) -> None:
        """Use the arrived proposals for the next step, and decide whether that step waits for more."""

    def wait_s(self, now_s: float) -> float | None:
        """Seconds to the next step; 0: it is due; None: no step until a frame arrives. Changes nothing."""

    def step(self, during: DuringPass, /) -> None:
        """Run one step and emit its results."""

    def tell_results(self) -> None:
        """Emit what is left of the last step: results are sent next."""
        return

    def before_send(self) -> None:
        """Owners are told next what was decided."""
        return

    def load(self) -> pb.LoadReport:
        """The replica's load report; also exports gauges."""


@dataclass(frozen=True)
class Wire:
    """The message types of one role's stream."""

    request: type[Any]
    response: type[Any]
    span_name: str = "session"
    """Name of a traced session's span."""
    last_phase: str = "decode"
    """Name of the span's last phase, after queue and prefill."""
    joins_links: bool = False
    """Whether the role joins sessions at targets, as drafts do; targets let drafts join."""
