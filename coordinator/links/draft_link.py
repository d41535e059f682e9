"""The stream to a draft replica."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, Self

import grpc

from coordinator.links.link_events import LinkEvents, LinkSettings
from coordinator.links.replica_link import ReplicaLink
from coordinator.links.wire import Call
from coordinator.sessions.session import Session
from specdec.rpc.channel import ReplicaChannel
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, draft_pb2_grpc


class ProposalHandler(Protocol):
    """Who takes proposals."""

    def on_proposal(self, session: Session, proposal: bytes) -> None:
        """A draft offers tokens; the bytes are an encoded Proposal, to be passed on unopened."""


class DraftWire:
    """See `Wire`. The latest load of each target leaves with the next frame."""

    def __init__(self) -> None:
        self._target_loads: dict[str, pb.LoadReport] = {}

    def tell_target_load(self, target: str, load: pb.LoadReport) -> None:
        """Put a target's load into the next frame, in place of what is there of the same target."""
        self._target_loads[target] = load

    def info(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """See `Wire.info`."""
        return draft_pb2_grpc.DraftServiceStub(channel).GetReplicaInfo(pb.GetReplicaInfoRequest())

    def open(self, channel: grpc.aio.Channel) -> Call[draft_pb2.DraftRequest]:
        """See `Wire.open`."""
        return draft_pb2_grpc.DraftServiceStub(channel).Draft()

    def attach(self, attach: pb.Attach) -> draft_pb2.DraftRequest:
        """See `Wire.attach`."""
        return draft_pb2.DraftRequest(attach=attach)

    def frame(self, entries: Sequence[draft_pb2.DraftEntry]) -> draft_pb2.DraftRequest:
        """See `Wire.frame`."""
        loads, self._target_loads = self._target_loads, {}
        told = [draft_pb2.TargetLoad(target=target, load=load) for target, load in loads.items()]
        return draft_pb2.DraftRequest(entries=entries, target_loads=told)

    def close_entry(self, session_id: str, epoch: int, reason: str) -> draft_pb2.DraftEntry:
        """See `Wire.close_entry`."""
        return draft_pb2.DraftEntry(session_id=session_id, epoch=epoch, close=pb.CloseSession(reason=reason))


class DraftLink(ReplicaLink[draft_pb2.DraftRequest, draft_pb2.DraftEntry, draft_pb2.DraftResult]):
    """Opens sessions on a draft, tells it what is committed, and hands proposals to the decode loop.

    After a break nothing is taken up: sessions are simply opened again with all their tokens.
    """

    def __init__(
        self,
        address: str,
        channel: ReplicaChannel,
        settings: LinkSettings,
        *,
        events: LinkEvents[DraftLink],
        proposals: ProposalHandler,
    ) -> None:
        self._draft_wire = DraftWire()
        super().__init__(
            role="draft",
            address=address,
            channel=channel,
            settings=settings,
            wire=self._draft_wire,
            events=events,
            epoch_of=lambda session: session.draft.epoch,
            handle=self._take,
            takes_up=False,
        )
        self._proposals = proposals

    def open(self, session: Session) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens.

        It names its target, whose load bounds how far to draft.
        """
        side = session.draft
        side.opened(self)
        self.sessions[session.session_id] = session
        traceparent = session.request.trace.session_opened(
            self.role,
            session.choice,
            session_id=session.session_id,
            address=self.address,
            epoch=side.epoch,
            position=session.position,
        )
        body = session.open_body(traceparent)
        if session.target.host is not None:
            body.target = session.target.host.address
        self.send(draft_pb2.DraftEntry(session_id=session.session_id, epoch=side.epoch, open=body))

    def commit(self, session: Session, start_position: int, token_ids: Sequence[int]) -> None:
        """Tell which tokens are final."""
        commit = pb.Commit(start_position=start_position, token_ids=token_ids)
        self.send(draft_pb2.DraftEntry(session_id=session.session_id, epoch=session.draft.epoch, commit=commit))

    def close(self: Self, session: Session, reason: str) -> None:
        """End a session."""
        self.sessions.pop(session.session_id, None)
        session.draft.host = None
        session.request.trace.session_closed(self.role, session.choice, self.address, reason)
        self.send(self._wire.close_entry(session.session_id, session.draft.epoch, reason))
        self._events.on_closed(self, session, reason)

    def tell_target_load(self, target: str, load: pb.LoadReport) -> None:
        """Bounds how far to draft for a target's sessions; the latest of each target leaves with the next frame."""
        self._draft_wire.tell_target_load(target, load)

    def _take(self: Self, session: Session, result: draft_pb2.DraftResult) -> None:
        kind = result.WhichOneof("result")
        if kind == "proposal":
            self._proposals.on_proposal(session, result.proposal)
        elif kind == "error":
            self._events.on_session_error(self, session, result.error)
