"""Protocols of replicas that hold sessions; the links implement them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from specdec.v1 import common_pb2 as pb

SessionT_contra = TypeVar("SessionT_contra", contravariant=True)


class SessionReplica(Protocol[SessionT_contra]):
    """A replica that holds a session. No method waits."""

    @property
    def role(self) -> str:
        """`target` or `draft`."""

    @property
    def address(self) -> str:
        """host:port."""

    @property
    def identity(self) -> pb.ModelIdentity | None:
        """Its last reported model."""

    @property
    def is_up(self) -> bool:
        """Its stream is up."""

    @property
    def is_ready(self) -> bool:
        """New sessions may be opened without restriction."""

    def open_session(self, session: SessionT_contra) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens."""

    def close_session(self, session: SessionT_contra, reason: str) -> None:
        """End a session."""


class TargetHost(SessionReplica[SessionT_contra], Protocol[SessionT_contra]):
    """The target that holds a session."""

    @property
    def tells_progress(self) -> bool:
        """It reports progress of sessions without a verdict; older targets do not."""

    @property
    def load(self) -> pb.LoadReport | None:
        """Its last report."""

    steps_apart: bool
    """It can step a session alone; older targets cannot."""

    def relay(self, session: SessionT_contra, proposal: bytes) -> None:
        """Pass on an encoded Proposal."""

    def grant_link(self, session: SessionT_contra, grant: pb.LinkGrant) -> None:
        """Let a draft join the session."""

    def give_credit(self, session: SessionT_contra) -> None:
        """Send the position up to which the target may run, and acknowledge the arrived tokens."""

    def release(self, session: SessionT_contra) -> None:
        """Give a session up to another target; this one frees it."""

    def hold(self, session: SessionT_contra) -> None:
        """Assign a session that is to be opened here later."""


class DraftHost(SessionReplica[SessionT_contra], Protocol[SessionT_contra]):
    """The draft that holds a session."""

    def commit(
        self, session: SessionT_contra, epoch: int, start_position: int, token_ids: Sequence[int], *, suspend: bool
    ) -> None:
        """Send tokens that are final, to the opening with this epoch; `suspend`: stop drafting."""

    def grant_link(self, session: SessionT_contra) -> None:
        """Let the session's first draft talk to its open target directly; once for each pair of openings."""

    def tell_target_load(self, target: str, load: pb.LoadReport) -> None:
        """Send the load of a target, which bounds how far to draft for its sessions, with one of the next frames."""
