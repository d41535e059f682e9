"""The stream to a target replica."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from typing import Protocol, Self

import grpc

from specdec.coordinator.links.link_events import LinkEvents, LinkSettings
from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.links.wire import BidiCall
from specdec.coordinator.sessions.session import Request, Session
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2_grpc, target_pb2, target_pb2_grpc
from specdec.wire.channel import ReplicaChannel
from specdec.wire.errors import IncompatibleReplica
from specdec.wire.message_sizes import most_entry_bytes
from specdec.wire.parsing.reading import parsed, parsing

_TOKENIZER_PATIENCE = 4
"""Factor on connect_timeout_s for a tokenizer: it has some megabytes, in several messages."""
_MAX_TOKENIZER_BYTES = 256 * 2**20
"""Bytes of a tokenizer, at most; the largest in use have some 40 MB."""


class VerdictHandler(Protocol):
    """Receives the targets' results."""

    def on_verdict(self, session: Session, verdict: pb.Verdict) -> None:
        """A target step committed tokens of a session."""

    def on_proposal_rejected(self, session: Session, rejected: pb.ProposalRejected) -> None:
        """The target refused a malformed proposal; the session goes on."""

    def on_prompt_logprobs(self, session: Session, part: pb.PromptLogprobsPart) -> None:
        """A target computed log-probabilities of a session's prompt."""


class TargetWire:
    """The target's `Wire`."""

    def info(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """See `Wire.info`."""
        return target_pb2_grpc.TargetServiceStub(parsing(channel, counts_parts=True)).GetReplicaInfo(
            pb.GetReplicaInfoRequest()
        )

    def info_as_other(self, channel: grpc.aio.Channel) -> Awaitable[pb.GetReplicaInfoResponse]:
        """See `Wire.info_as_other`."""
        return draft_pb2_grpc.DraftServiceStub(parsing(channel, counts_parts=True)).GetReplicaInfo(
            pb.GetReplicaInfoRequest()
        )

    def open(self, channel: grpc.aio.Channel) -> BidiCall[target_pb2.VerifyRequest]:
        """See `Wire.open`."""
        return target_pb2_grpc.TargetServiceStub(parsing(channel, counts_parts=True)).Verify()

    def attach(self, attach: pb.Attach) -> target_pb2.VerifyRequest:
        """See `Wire.attach`."""
        return target_pb2.VerifyRequest(attach=attach)

    def frame(self, entries: Sequence[target_pb2.TargetEntry]) -> target_pb2.VerifyRequest:
        """See `Wire.frame`."""
        return target_pb2.VerifyRequest(entries=entries)

    def close_entry(self, session_id: str, epoch: int, reason: str) -> target_pb2.TargetEntry:
        """See `Wire.close_entry`."""
        return target_pb2.TargetEntry(session_id=session_id, epoch=epoch, close=pb.CloseSession(reason=reason))


class TargetLink(ReplicaLink[target_pb2.VerifyRequest, target_pb2.TargetEntry, target_pb2.TargetResult]):
    """Opens sessions on a target, relays proposals to it, and hands verdicts to the decode loop.

    A target keeps its sessions over a break of the stream.
    """

    def __init__(
        self,
        address: str,
        channel: ReplicaChannel,
        settings: LinkSettings,
        *,
        events: LinkEvents[TargetLink],
        verdicts: VerdictHandler,
    ) -> None:
        super().__init__(
            role="target",
            address=address,
            channel=channel,
            settings=settings,
            wire=TargetWire(),
            events=events,
            epoch_of=lambda session: session.target.epoch,
            handle=self._take,
            takes_up=True,
        )
        self._verdicts = verdicts
        self._tells_progress = False

    @property
    def tells_progress(self) -> bool:
        """It reports progress of sessions without a verdict; older targets do not."""
        return self._tells_progress

    @property
    def holder(self) -> str:
        """Name of the replica's prefix cache, which changes with a restart."""
        return self.instance_id or self.address

    def open_session(self, session: Session) -> None:
        """Open a session, or open it again, under a new epoch and with all its tokens."""
        side = session.target
        side.opened(self)
        if self.identity is not None:
            session.computed_with(self.identity.numerics_id)
        self.sessions[session.session_id] = session
        traceparent = session.request.trace.session_opened(
            self.role,
            session.choice,
            session_id=session.session_id,
            address=self.address,
            epoch=side.epoch,
            position=session.position,
        )
        body = session.open_body(traceparent, for_target=True)
        body.tells_trees = session.request.with_steps
        body.has_no_draft = not session.drafting.has_draft
        if side.cleared_at is not None:
            body.apart_until = side.cleared_at
        if side.prompt is not None:
            side.prompt.ask(body)
        self.send(target_pb2.TargetEntry(session_id=session.session_id, epoch=side.epoch, open=body))

    def relay(self, session: Session, proposal: bytes) -> None:
        """Pass on an encoded Proposal; a session that is to be opened later has no use for it."""
        side = session.target
        if side.is_held:
            return
        side.was_relayed = True
        self.send(target_pb2.TargetEntry(session_id=session.session_id, epoch=side.epoch, proposal=proposal))

    def grant_link(self, session: Session, grant: pb.LinkGrant) -> None:
        """Let a draft join the session."""
        self.send(target_pb2.TargetEntry(session_id=session.session_id, epoch=session.target.epoch, link=grant))

    def give_credit(self, session: Session) -> None:
        """Send the position up to which the target may run, and acknowledge the arrived tokens, as an opening does."""
        side = session.target
        if side.is_held:
            return
        credit = pb.Credit(position=side.credit_position, acknowledged_position=session.position)
        if side.prompt is not None:
            credit.prompt_logprobs_position = side.prompt.credit
            credit.acknowledged_prompt_logprobs_position = side.prompt.arrived
        self.send(target_pb2.TargetEntry(session_id=session.session_id, epoch=side.epoch, credit=credit))

    def close_session(self: Self, session: Session, reason: str) -> None:
        """End a session."""
        self.sessions.pop(session.session_id, None)
        session.request.trace.session_closed(self.role, session.choice, self.address, reason)
        self.send(self._wire.close_entry(session.session_id, session.target.told_epoch, reason))
        self._events.on_closed(self, session, reason)

    def release(self, session: Session) -> None:
        """Give a session up to another target; this one frees it."""
        session.request.trace.session_closed(self.role, session.choice, self.address, "replaced")
        if self.sessions.pop(session.session_id, None) is not None:
            self.send(self._wire.close_entry(session.session_id, session.target.told_epoch, "replaced"))

    def hold(self, session: Session) -> None:
        """Assign a session that is to be opened here later."""
        session.target.held(self)
        self.sessions[session.session_id] = session

    def may_take(self, request: Request) -> bool:
        """Whether all messages about a request, in both directions, are within their receivers' limits."""
        is_small_enough = self.tells_limit or request.num_prompt_logprobs_bytes <= most_entry_bytes(
            self._settings.max_message_bytes
        )
        return is_small_enough and request.num_open_bytes <= most_entry_bytes(self.message_bytes)

    async def fetch_tokenizer(self) -> tuple[bytes, str]:
        """Contents of tokenizer.json and tokenizer_config.json. Raises IncompatibleReplica if they are too large."""
        pieces: list[bytes] = []
        configs: list[str] = []
        num_bytes = 0
        stub = target_pb2_grpc.TargetServiceStub(parsing(self.channel.current, counts_parts=True))
        timeout_s = self._settings.connect_timeout_s * _TOKENIZER_PATIENCE
        asked = pb.GetTokenizerRequest(max_message_bytes=self._settings.max_message_bytes)
        async for piece in stub.GetTokenizer(asked, timeout=timeout_s):
            pieces.append(parsed(piece).tokenizer_json)
            configs.append(piece.tokenizer_config)
            num_bytes += piece.ByteSize()
            if num_bytes > _MAX_TOKENIZER_BYTES:
                raise IncompatibleReplica(f"its tokenizer exceeds {_MAX_TOKENIZER_BYTES} bytes")
        return b"".join(pieces), "".join(configs)

    def _take(self: Self, session: Session, result: target_pb2.TargetResult) -> None:
        kind = result.WhichOneof("result")
        if kind == "verdict":
            self._verdicts.on_verdict(session, result.verdict)
        elif kind == "prompt_logprobs":
            self._verdicts.on_prompt_logprobs(session, result.prompt_logprobs)
        elif kind == "progress":
            self._tells_progress = True
            session.target.told(result.progress, time.monotonic())
        elif kind == "proposal_rejected":
            self._verdicts.on_proposal_rejected(session, result.proposal_rejected)
        elif kind == "error":
            self._events.on_session_error(self, session, result.error)
