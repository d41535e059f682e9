"""A host for a role without a worker, which keeps the role's proposals."""

from __future__ import annotations

from typing import Generic

from specdec.replica.worker.errors import FaultLog
from specdec.replica.worker.sessions import EngineSessionTable, SessionT
from specdec.v1 import common_pb2 as pb


class Steps:
    def work_on(self, keys: list[bytes]) -> None:
        """Ignored."""


class Heard(Generic[SessionT]):
    """Sessions, and all proposals in order."""

    def __init__(self) -> None:
        self.sessions = EngineSessionTable[SessionT](60.0)
        self.faults = FaultLog()
        self.steps = Steps()
        self.proposals: list[pb.Proposal] = []

    def emit(self, session: SessionT, **body: bytes) -> None:
        self.proposals.append(pb.Proposal.FromString(body["proposal"]))
