"""The stream to a draft replica."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Sequence
from typing import Protocol, Self

import grpc

from specdec.coordinator.links.link_events import LinkEvents, LinkSettings
from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.links.wire import BidiCall
from specdec.coordinator.sessions.drafting import DraftSide
from specdec.coordinator.sessions.session import Session
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2_grpc
from specdec.wire.channel import ReplicaChannel
from specdec.wire.parsing.reading import parsing

_MOST_STRAYS = 4096
_MOST_STRAYS_PER_SESSION = 4
"""Stray results (of unknown sessions or old epochs) since the last open or close above which a draft is reset: this
many, or four per session if it had more than a thousand. Strays are normal while closes and reopens cross with
proposals."""
_PROOF_TOKENS = 64
"""Tokens for which a session that a draft died under is stepped alone at its next draft."""
_MOST_WAYS = 64
"""Targets whose ways are remembered."""
_MOST_REASON_CHARS = 200
"""Characters of a draft's reason that are kept."""
_KEY_BYTES = 16
"""Bytes of a grant's key."""
_MOST_LOADS_BYTES = 900
"""Bytes of target loads in one frame besides its entries: some ten targets; the others go with the next frame."""


class ProposalHandler(Protocol):
    """Receives proposals."""

    def on_proposal(self, session: Session, side: DraftSide, proposal: bytes) -> None:
        """A draft of the session offers tokens; the bytes are an encoded Proposal, to be passed on without parsing."""

    def on_link(self, session: Session, side: DraftSide, state: pb.LinkState) -> None:
        """A draft of the session has joined it at the target, or has left it there."""


class DraftWire:
    """The draft's `Wire`. The latest loads of targets leave with the next frames."""

    def __init__(self) -> None:
        self._target_loads: dict[str, pb.LoadReport] = {}

    def tell_target_load(self, target: str, load: pb.LoadReport) -> None:
        """Put a target's load into one of the next frames, in place of an older one of the same target."""
        self._target_loads[target] = load

    def info(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """See `Wire.info`."""
        return draft_pb2_grpc.DraftServiceStub(parsing(channel, counts_parts=True)).GetReplicaInfo(
            pb.GetReplicaInfoRequest()
        )

    def info_as_other(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """See `Wire.info_as_other`."""
        return target_pb2_grpc.TargetServiceStub(parsing(channel, counts_parts=True)).GetReplicaInfo(
            pb.GetReplicaInfoRequest()
        )

    def open(self, channel: grpc.aio.Channel) -> BidiCall[draft_pb2.DraftRequest]:
        """See `Wire.open`."""
        return draft_pb2_grpc.DraftServiceStub(parsing(channel, counts_parts=True)).Draft()

    def attach(self, attach: pb.Attach) -> draft_pb2.DraftRequest:
        """See `Wire.attach`."""
        return draft_pb2.DraftRequest(attach=attach)

    def frame(self, entries: Sequence[draft_pb2.DraftEntry]) -> draft_pb2.DraftRequest:
        """See `Wire.frame`."""
        told: list[draft_pb2.TargetLoad] = []
        room_bytes = _MOST_LOADS_BYTES
        for target, load in list(self._target_loads.items()):
            one = draft_pb2.TargetLoad(target=target, load=load)
            room_bytes -= one.ByteSize()
            if told and room_bytes < 0:
                break
            told.append(one)
            del self._target_loads[target]
        return draft_pb2.DraftRequest(entries=entries, target_loads=told)

    def close_entry(self, session_id: str, epoch: int, reason: str) -> draft_pb2.DraftEntry:
        """See `Wire.close_entry`."""
        return draft_pb2.DraftEntry(session_id=session_id, epoch=epoch, close=pb.CloseSession(reason=reason))


class DraftLink(ReplicaLink[draft_pb2.DraftRequest, draft_pb2.DraftEntry, draft_pb2.DraftResult]):
    """Opens sessions on a draft, commits tokens to it, and hands proposals to the decode loop.

    After a break no session is kept: all are opened again with all their tokens.
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
            epoch_of=lambda session: session.drafting.epoch_at(self),
            handle=self._take,
            takes_up=False,
        )
        self._proposals = proposals
        self.ways: dict[str, api.LinkStatus] = {}
        """Ways to targets, by address, as last reported."""
        self._num_strays = 0
        self._most_sessions = 0

    def on_stray(self) -> None:
        """Reset a draft that keeps sending results of sessions that it does not have."""
        self._num_strays += 1
        if self._num_strays > max(_MOST_STRAYS, _MOST_STRAYS_PER_SESSION * self._most_sessions):
            self._num_strays = 0
            self.reset("too many results of unknown sessions")

    def open_session(self, session: Session) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens.

        The message names the session's target, whose load bounds how far to draft and goes with it.
        """
        side = session.drafting.opened(self)
        side.told = session.position
        self._num_strays = 0
        self.sessions[session.session_id] = session
        self._most_sessions = max(self._most_sessions, len(self.sessions))
        traceparent = session.request.trace.session_opened(
            self.role,
            session.choice,
            session_id=session.session_id,
            address=self.address,
            epoch=side.epoch,
            position=session.position,
        )
        body = session.open_body(traceparent)
        if session.drafting.num_deaths:
            body.apart_until = session.position + _PROOF_TOKENS
        if (target := session.target.host) is not None:
            body.target = target.address
            if target.load is not None:
                self.tell_target_load(target.address, target.load)
        self.send(draft_pb2.DraftEntry(session_id=session.session_id, epoch=side.epoch, open=body))
        self.grant_link(session)

    def grant_link(self, session: Session) -> None:
        """See `DraftHost.grant_link`."""
        side, target = session.drafting.at(self), session.target
        is_first = side is not None and session.drafting.sides[0] is side
        if side is None or not is_first or target.host is None or not target.is_open or not self._settings.grants_links:
            return
        if side.granted_for == target.epoch or target.told_epoch != target.epoch:  # the target's opening follows
            return
        side.granted_for = target.epoch
        grant = pb.LinkGrant(key=secrets.token_bytes(_KEY_BYTES), epoch=side.epoch)
        target.host.grant_link(session, grant)
        grant.target = target.host.address
        self.send(draft_pb2.DraftEntry(session_id=session.session_id, epoch=side.epoch, link=grant))

    def commit(
        self, session: Session, epoch: int, start_position: int, token_ids: Sequence[int], *, suspend: bool
    ) -> None:
        """See `DraftHost.commit`."""
        commit = pb.Commit(start_position=start_position, token_ids=token_ids, suspend=suspend)
        self.send(draft_pb2.DraftEntry(session_id=session.session_id, epoch=epoch, commit=commit))

    def close_session(self: Self, session: Session, reason: str) -> None:
        """End a session."""
        self.sessions.pop(session.session_id, None)
        self._num_strays = 0
        session.request.trace.session_closed(self.role, session.choice, self.address, reason)
        self.send(self._wire.close_entry(session.session_id, session.drafting.epoch_at(self), reason))
        self._events.on_closed(self, session, reason)
        session.drafting.closed(self)
        if session.finish is None and session.drafting.sides:
            session.drafting.sides[0].host.grant_link(session)

    def tell_target_load(self, target: str, load: pb.LoadReport) -> None:
        """See `DraftHost.tell_target_load`."""
        self._draft_wire.tell_target_load(target, load)

    def _note_way(self, session: Session, state: pb.LinkState) -> None:
        if (target := session.target.host) is not None:
            if target.address not in self.ways and len(self.ways) >= _MOST_WAYS:
                self.ways.clear()
            reason = state.reason[:_MOST_REASON_CHARS]
            self.ways[target.address] = api.LinkStatus(target=target.address, is_direct=state.is_direct, reason=reason)

    def _take(self: Self, session: Session, result: draft_pb2.DraftResult) -> None:
        kind = result.WhichOneof("result")
        side = session.drafting.at(self)
        if side is not None and kind == "proposal":
            self._proposals.on_proposal(session, side, result.proposal)
        elif side is not None and kind == "link":
            self._note_way(session, result.link)
            self._proposals.on_link(session, side, result.link)
        elif kind == "error":
            self._events.on_session_error(self, session, result.error)
        elif side is not None and kind == "opened" and not side.is_open:
            side.is_open = True
        else:
            self.on_stray()
