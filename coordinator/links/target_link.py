"""The stream to a target replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from coordinator.links.link_events import LinkEvents, LinkSettings
from coordinator.links.replica_link import ReplicaLink
from coordinator.sessions.session import Session
from specdec.rpc.channel import ReplicaChannel
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2, target_pb2_grpc


class VerdictHandler(Protocol):
    """Who takes what targets decide."""

    def on_verdict(self, session: Session, verdict: pb.Verdict) -> None:
        """A target step decided something for a session."""

    def on_proposal_rejected(self, session: Session, rejected: pb.ProposalRejected) -> None:
        """What a draft offered is no proposal; the session goes on."""


class TargetLink(ReplicaLink):
    """Opens sessions on a target, relays proposals to it, and hands verdicts to the decode loop."""

    role = "target"

    def __init__(
        self,
        address: str,
        channel: ReplicaChannel,
        settings: LinkSettings,
        events: LinkEvents,
        verdicts: VerdictHandler,
    ) -> None:
        super().__init__(address, channel, settings, events)
        self._verdicts = verdicts

    @property
    def holder(self) -> str:
        """Names the replica's prefix cache, which a restart empties."""
        return self.instance_id or self.address

    def open(self, session: Session) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens."""
        session.target = self
        session.target_epoch += 1
        session.was_relayed = False
        self.sessions[session.session_id] = session
        traceparent = session.request.trace.session_opened(self.role, session, self.address, session.target_epoch)
        self._queue(self._entry(session, open=session.open_body(traceparent)))

    def relay(self, session: Session, proposal: bytes) -> None:
        """Pass on an encoded Proposal."""
        session.was_relayed = True
        self._queue(self._entry(session, proposal=proposal))

    def give_credit(self, session: Session) -> None:
        """Tell how far the target may run, and what has arrived."""
        credit = pb.Credit(position=session.credit_position, acknowledged_position=len(session.token_ids))
        self._queue(self._entry(session, credit=credit))

    def close(self, session: Session, reason: str) -> None:
        """End a session."""
        self.sessions.pop(session.session_id, None)
        session.request.trace.session_closed(self.role, session, self.address, reason)
        self._queue(self._entry(session, close=pb.CloseSession(reason=reason)))
        self._events.on_closed(self, session, reason)

    def release(self, session: Session) -> None:
        """Give a session up to another target; what this one still holds of it is freed."""
        session.request.trace.session_closed(self.role, session, self.address, "replaced")
        if self.sessions.pop(session.session_id, None) is not None:
            self._queue(self._entry(session, close=pb.CloseSession(reason="replaced")))

    def supersede(self, session: Session) -> None:
        """Drop whatever still comes from the current opening; the session stays, to be opened again."""
        session.target_epoch += 1

    async def fetch_tokenizer(self) -> tuple[bytes, str]:
        """tokenizer.json and tokenizer_config.json of the target's model."""
        pieces: list[bytes] = []
        config = ""
        call = self._stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=self._settings.connect_timeout_s * 4)
        async for piece in call:
            pieces.append(piece.tokenizer_json)
            config = config or piece.tokenizer_config
        return b"".join(pieces), config

    def _entry(self, session: Session, **body: Any) -> target_pb2.TargetEntry:
        return target_pb2.TargetEntry(session_id=session.session_id, epoch=session.target_epoch, **body)

    def _close_entry(self, session_id: str, epoch: int) -> target_pb2.TargetEntry:
        return target_pb2.TargetEntry(session_id=session_id, epoch=epoch, close=pb.CloseSession(reason="replaced"))

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return target_pb2_grpc.TargetServiceStub(channel)

    def _open_call(self) -> Any:
        return self._stub.Verify()

    def _sessions_to_attach(self) -> list[Session]:
        return list(self.sessions.values())

    def _attach_frame(self, sessions: Sequence[Session]) -> target_pb2.VerifyRequest:
        return target_pb2.VerifyRequest(attach=self._attach(sessions))

    def _frame(self, entries: Sequence[target_pb2.TargetEntry]) -> target_pb2.VerifyRequest:
        return target_pb2.VerifyRequest(entries=entries)

    def _epoch(self, session: Session) -> int:
        return session.target_epoch

    def _handle_result(self, session: Session, result: target_pb2.TargetResult) -> None:
        kind = result.WhichOneof("result")
        if kind == "verdict":
            self._verdicts.on_verdict(session, result.verdict)
        elif kind == "proposal_rejected":
            self._verdicts.on_proposal_rejected(session, result.proposal_rejected)
        elif kind == "error":
            self._events.on_session_error(self, session, result.error)
