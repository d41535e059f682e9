"""Between a session's target and its drafts: tokens go to the drafts, proposals to the target.

A draft and a target with a direct link exchange both themselves. The coordinator then only watches: a verdict says
whether its tokens went to the draft, and up to where the draft has answered. It relays again as soon as the draft has
left the link, or the draft seems not to hear the target. Tokens that arrive twice are compared and do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specdec.config.coordinator import ProposalPath
from specdec.coordinator.observer import Observer
from specdec.coordinator.sessions.drafting import DraftFault, DraftSide
from specdec.coordinator.sessions.session import DraftHost, Session
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MAX_PROPOSAL_BYTES
from specdec.wire.proposals import MOST_PROPOSALS, MOST_PROPOSED_BYTES

_MOST_DOUBLINGS = 6
"""Doublings, at most, of a draft's stall time-out: each missed time-out doubles it."""
_FLOOD = 4
"""Multiple of the limits of proposals above which the draft is taken for faulty."""
_MOST_LINK_CHANGES = 64
"""Joins and leaves of a draft between two commits, at most: each leave may cost all the session's tokens."""


class DraftRelay:
    """Called in the event loop's thread; it never blocks."""

    def __init__(
        self,
        *,
        observer: Observer,
        path: ProposalPath,
        stall_s: float,
        on_bad_draft: Callable[[Session, str, DraftHost | None], None],
        on_draft: Callable[[Session, DraftSide, DraftFault], None],
        on_hedged: Callable[[Session], None],
    ) -> None:
        """Relay nothing yet.

        Args:
            observer: counts proposals.
            path: the setting `proposal_path`.
            stall_s: how long a draft may receive commits without sending a proposal that knows of them.
            on_bad_draft: called, with the cause, when a proposal is too large.
            on_draft: called when a draft stalls, is slow, or proposes far more than anyone can verify.
            on_hedged: called after each step of a session that has two drafts.
        """
        self._observer = observer
        self._path = path
        self._stall_s = stall_s
        self._on_bad_draft = on_bad_draft
        self._on_draft = on_draft
        self._on_hedged = on_hedged

    def on_proposal(self, session: Session, side: DraftSide, proposal: bytes) -> None:
        """A draft of the session offers tokens: pass them on without parsing."""
        side.num_proposals += 1
        side.num_proposed_bytes += len(proposal)
        excess = max(side.num_proposals / MOST_PROPOSALS, side.num_proposed_bytes / MOST_PROPOSED_BYTES)
        if len(proposal) > MAX_PROPOSAL_BYTES:
            cause = f"proposal: {len(proposal)} bytes exceed the limit of {MAX_PROPOSAL_BYTES}"
            self._on_bad_draft(session, cause, side.host)
            return
        if excess > 1:  # a target could not use it
            if excess > _FLOOD:
                self._on_draft(session, side, DraftFault.FLOOD)
        elif session.target.host is not None:
            session.drafting.num_stalls, now_s = 0, time.monotonic()
            self._observer.proposal(session, now_s, side.proposed(proposal, now_s), is_direct=False)
            if self._path != "direct":
                session.target.host.relay(session, proposal)

    def on_link(self, session: Session, side: DraftSide, state: pb.LinkState) -> None:
        """A draft has joined the session at its target, or has left it there and lacks the tokens since."""
        side.num_link_changes += 1
        if side.num_link_changes > _MOST_LINK_CHANGES:
            self._on_draft(session, side, DraftFault.FLOOD)
            return
        was_linked, side.is_linked = side.is_linked, state.is_direct
        side.linked_position = max(side.linked_position, state.position)
        side.told = min(state.position, session.position)
        self._observer.linked(side.host.address, session, state)
        if was_linked and not side.is_linked and not side.is_suspended and side.told < session.position:
            unknown = session.token_ids[side.told :]
            side.host.commit(session, side.epoch, side.told, unknown, suspend=False)
            side.told = session.position

    def commit(
        self,
        session: Session,
        start: int,
        token_ids: Sequence[int],
        now_s: float,
        *,
        is_plain: bool,
        suspend: bool,
        linked: pb.LinkedDraft | None,
    ) -> None:
        """Commit a verdict's tokens to the drafts. A suspended draft gets all at once when it resumes.

        `linked`: the draft to which the target has sent them; None: to none.
        """
        drafting = session.drafting
        for side in tuple(drafting.sides):
            draft = side.host
            if draft.identity is not None and session.position >= draft.identity.max_model_len:
                draft.close_session(session, "past the draft's context")
                continue
            is_direct = linked is not None and side.is_linked and linked.epoch == side.epoch
            if is_direct and linked is not None:
                self._note_answer(session, side, linked, now_s)
            if side.is_suspended and suspend:
                continue
            if not is_direct or side.seems_deaf(now_s):
                unknown = token_ids if side.told == start else session.token_ids[side.told :]
                draft.commit(session, side.epoch, session.position - len(unknown), unknown, suspend=suspend)
                side.told = session.position
            if suspend:
                side.suspended()
                continue
            side.is_suspended = False
            waited_s = side.committed(session.position, now_s, is_plain=is_plain)
            if waited_s is None:
                continue
            if waited_s >= self._stall_s * 2 ** min(drafting.num_stalls, _MOST_DOUBLINGS):
                self._on_draft(session, side, DraftFault.STALL)
            elif drafting.is_slow(side):
                self._on_draft(session, side, DraftFault.SLOW)
        if len(drafting.sides) > 1:
            self._on_hedged(session)

    def _note_answer(self, session: Session, side: DraftSide, linked: pb.LinkedDraft, now_s: float) -> None:
        answer_s = side.answered_directly(linked, session.position, now_s)
        if answer_s is not None:
            session.drafting.num_stalls = 0
            session.target.was_relayed = True
            self._observer.proposal(session, now_s, answer_s, is_direct=True)
