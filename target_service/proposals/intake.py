"""Proposals that draft services sent, merged into their sessions' trees."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError

from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.replica.worker.host import SessionHost
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.proposals.legal import drop_illegal
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.session import TargetSession
from specdec.target_service.tree.proposed import ReadProposal
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MAX_PROPOSAL_BYTES
from specdec.wire.sampling_params import RejectionMethod


class ProposalIntake:
    """Merges proposals, and rejects malformed ones."""

    def __init__(self, host: SessionHost[TargetSession], recorder: TargetRecorder, tell: Callable[[], None]) -> None:
        """`tell`: tells owners of their sessions' latest tokens, before a rejection names the position after them."""
        self._host = host
        self._recorder = recorder
        self._tell = tell

    def read_proposal(self, session: TargetSession, encoded: bytes) -> bytes | ReadProposal:
        """Parse and check a proposal while a GPU computes: the part of merging that needs no next verdict.

        A malformed or too large proposal is returned as it is: `absorb` rejects it.
        """
        if len(encoded) > MAX_PROPOSAL_BYTES:
            return encoded
        try:
            proposal = pb.Proposal.FromString(encoded)
            return ReadProposal(proposal, session.tree.check(proposal, session.num_tokens))
        except (DecodeError, SessionFailure):
            return encoded

    def absorb(self, session: TargetSession, pacing: Pacing, now_s: float) -> None:
        """Merge the session's latest proposal, if one has arrived, into its tree; `pacing` learns the draft's speed.

        A malformed proposal is answered by a ProposalRejected: the session may lose its draft, never its tokens.
        """
        arrived, session.arrived = session.arrived, None
        if arrived is None:
            return
        if not pacing.may_verify(session):
            session.tree.clear()
            return
        depth_before = session.tree.lasting_depth
        try:
            if isinstance(arrived, ReadProposal):
                proposal, nodes = arrived.proposal, arrived.nodes
            else:
                proposal, nodes = _parsed(arrived), None
            if not proposal.draws_afresh:
                session.rejection_method = RejectionMethod.STANDARD
            session.tree.merge(proposal, session.token_ids, nodes)
            drop_illegal(session)
        except DecodeError:
            self._reject(session, invalid("proposal", "does not parse"))
        except SessionFailure as failure:
            self._reject(session, failure)
        else:
            pacing.observe_proposal(session, depth_before, proposal, now_s)

    def _reject(self, session: TargetSession, failure: SessionFailure) -> None:
        self._tell()
        self._recorder.rejected_proposal()
        rejected = pb.ProposalRejected(status=failure.to_status(), expected_position=session.num_tokens)
        self._host.emit(session, proposal_rejected=rejected)


def _parsed(encoded: bytes) -> pb.Proposal:
    if len(encoded) > MAX_PROPOSAL_BYTES:
        raise invalid("proposal", f"{len(encoded)} bytes, at most {MAX_PROPOSAL_BYTES} are read")
    return pb.Proposal.FromString(encoded)
