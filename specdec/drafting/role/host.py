"""What a drafter needs of the place where it drafts."""

from __future__ import annotations

from typing import Any, Protocol

from specdec.drafting.role.session import FollowingT
from specdec.replica.bridge.step_memory import StepMemory
from specdec.replica.worker.errors import FaultLog, SessionFailure
from specdec.replica.worker.sessions import EngineSessionTable


class DraftingHost(Protocol[FollowingT]):
    """Knows the sessions, takes their proposals, and is told of those that fail: see `specdec.replica.worker.host`."""

    sessions: EngineSessionTable[FollowingT]
    faults: FaultLog
    steps: StepMemory

    def emit(self, session: FollowingT, **body: Any) -> None:
        """A result for whoever opened the session, such as an encoded proposal."""

    def failed(self, session: FollowingT, failure: SessionFailure) -> None:
        """The drafter has closed a session because of an error."""
