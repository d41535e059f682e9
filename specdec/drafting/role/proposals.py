"""A session's tree of guesses as a proposal."""

from __future__ import annotations

from specdec.drafting.role.session import DraftSession
from specdec.replica.worker.clamping import uint32
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import VerifyMode


def make_proposal(session: DraftSession, *, is_complete: bool = False) -> pb.Proposal:
    """The whole tree, hung from the last committed token. Cost: linear in its nodes, of which there are at most 64.

    `is_complete`: nothing will be added to it before a commit.
    """
    tree, notes = session.tree, session.notes
    main_path = session.main_path
    proposal = pb.Proposal(
        start_position=session.num_committed,
        token_ids=tree.token_ids,
        parents=() if tree.is_chain else tree.parents,
        draft_us=uint32(sum(notes[node].draft_us for node in main_path)),
        path_length=len(main_path),
        is_complete=is_complete,
    )
    if session.mode is VerifyMode.REJECTION:
        samples = [note.sample for note in notes if note.sample is not None]
        sparse = [pb.SparseDistribution(token_ids=sample.ids, probs=sample.probs) for sample in samples]
        proposal.distributions.extend(sparse)
        proposal.draws_afresh = True
    else:
        proposal.scores = bytes(round(note.score * 255) for note in notes)
    return proposal
