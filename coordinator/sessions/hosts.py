"""Replicas that hold sessions, as sessions see them; the links are such hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from specdec.v1 import common_pb2 as pb

SessionT_contra = TypeVar("SessionT_contra", contravariant=True)


class SessionHost(Protocol[SessionT_contra]):
    """A replica that holds a session, as the session sees it. No call here waits."""

    @property
    def role(self) -> str:
        """`target` or `draft`."""

    @property
    def address(self) -> str:
        """host:port."""

    @property
    def identity(self) -> pb.ModelIdentity | None:
        """What it serves, as it said last."""

    @property
    def is_up(self) -> bool:
        """What is sent now reaches it."""

    @property
    def is_ready(self) -> bool:
        """New sessions may be opened without a second thought."""

    def open(self, session: SessionT_contra) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens."""

    def close(self, session: SessionT_contra, reason: str) -> None:
        """End a session."""


class TargetHost(SessionHost[SessionT_contra], Protocol[SessionT_contra]):
    """The target that holds a session."""

    @property
    def tells_progress(self) -> bool:
        """It tells what sessions without a verdict are doing; older targets do not."""

    steps_apart: bool
    """It steps sessions alone that are opened so; older targets do not."""

    def relay(self, session: SessionT_contra, proposal: bytes) -> None:
        """Pass on an encoded Proposal."""

    def give_credit(self, session: SessionT_contra) -> None:
        """Tell how far the target may run, and what has arrived."""

    def release(self, session: SessionT_contra) -> None:
        """Give a session up to another target; what this one still holds of it is freed."""

    def hold(self, session: SessionT_contra) -> None:
        """Take a session that is to be opened here later."""


class DraftHost(SessionHost[SessionT_contra], Protocol[SessionT_contra]):
    """The draft that holds a session."""

    def commit(
        self, session: SessionT_contra, epoch: int, start_position: int, token_ids: Sequence[int], *, suspend: bool
    ) -> None:
        """Tell which tokens are final, in the opening that has this epoch; `suspend`: and that no more are to be
        drafted.
        """
