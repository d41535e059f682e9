"""The stream to a draft replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from coordinator.links.link_events import LinkEvents, LinkSettings
from coordinator.links.replica_link import ReplicaLink
from coordinator.sessions.session import Session
from specdec.rpc.channel import ReplicaChannel
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, draft_pb2_grpc


class ProposalHandler(Protocol):
    """Who takes proposals."""

    def on_proposal(self, session: Session, proposal: bytes) -> None:
        """A draft offers tokens; the bytes are an encoded Proposal, to be passed on unopened."""


class DraftLink(ReplicaLink):
    """Opens sessions on a draft, tells it what is committed, and hands proposals to the decode loop.

    After a break nothing is taken up: sessions are simply opened again with all their tokens.
    """

    role = "draft"

    def __init__(
        self,
        address: str,
        channel: ReplicaChannel,
        settings: LinkSettings,
        events: LinkEvents,
        proposals: ProposalHandler,
    ) -> None:
        super().__init__(address, channel, settings, events)
        self._proposals = proposals
        self._target_loads: dict[str, pb.LoadReport] = {}

    def open(self, session: Session) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens.

        It names its target, whose load bounds how far to draft.
        """
        session.draft = self
        session.draft_epoch += 1
        self.sessions[session.session_id] = session
        traceparent = session.request.trace.session_opened(self.role, session, self.address, session.draft_epoch)
        body = session.open_body(traceparent)
        if session.target is not None:
            body.target = session.target.address
        self._queue(self._entry(session, open=body))

    def commit(self, session: Session, start_position: int, token_ids: Sequence[int]) -> None:
        """Tell which tokens are final."""
        self._queue(self._entry(session, commit={"start_position": start_position, "token_ids": token_ids}))

    def close(self, session: Session, reason: str) -> None:
        """End a session."""
        self.sessions.pop(session.session_id, None)
        session.draft = None
        session.request.trace.session_closed(self.role, session, self.address, reason)
        self._queue(self._entry(session, close=pb.CloseSession(reason=reason)))
        self._events.on_closed(self, session, reason)

    def tell_target_load(self, target: str, load: pb.LoadReport) -> None:
        """Bounds how far to draft for a target's sessions; the latest of each target leaves with the next frame."""
        self._target_loads[target] = load

    def _entry(self, session: Session, **body: Any) -> draft_pb2.DraftEntry:
        return draft_pb2.DraftEntry(session_id=session.session_id, epoch=session.draft_epoch, **body)

    def _close_entry(self, session_id: str, epoch: int) -> draft_pb2.DraftEntry:
        return draft_pb2.DraftEntry(session_id=session_id, epoch=epoch, close=pb.CloseSession(reason="replaced"))

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return draft_pb2_grpc.DraftServiceStub(channel)

    def _open_call(self) -> Any:
        return self._stub.Draft()

    def _sessions_to_attach(self) -> list[Session]:
        return []

    def _attach_frame(self, sessions: Sequence[Session]) -> draft_pb2.DraftRequest:
        return draft_pb2.DraftRequest(attach=self._attach(sessions))

    def _frame(self, entries: Sequence[draft_pb2.DraftEntry]) -> draft_pb2.DraftRequest:
        loads, self._target_loads = self._target_loads, {}
        told = [draft_pb2.TargetLoad(target=target, load=load) for target, load in loads.items()]
        return draft_pb2.DraftRequest(entries=entries, target_loads=told)

    def _epoch(self, session: Session) -> int:
        return session.draft_epoch

    def _handle_result(self, session: Session, result: draft_pb2.DraftResult) -> None:
        kind = result.WhichOneof("result")
        if kind == "proposal":
            self._proposals.on_proposal(session, result.proposal)
        elif kind == "error":
            self._events.on_session_error(self, session, result.error)
