"""All proposals for a step, gathered on the sessions' trees.

The order: the target's drafters that gain more per second than its own draft; that draft; tokens that a constraint
forces; proposals that have arrived; all other drafters. After each source, nodes that the constraint forbids are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.replica.worker.host import SessionHost
from specdec.target_service.pacing.expectations import most_accepted, note_call
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.proposals.intake import ProposalIntake
from specdec.target_service.proposals.legal import drop_illegal, hang_forced
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.session import SessionState, TargetSession
from specdec.wire.sampling_params import VerifyMode


class Gathering:
    """Asks all sources. An error in one session's part ends that session only, by `fault`."""

    def __init__(
        self,
        host: SessionHost[TargetSession],
        own_draft: OwnDraft,
        local_drafters: LocalDrafters,
        intake: ProposalIntake,
        recorder: TargetRecorder,
        fault: Callable[[TargetSession, Exception], None],
    ) -> None:
        self._host = host
        self._own_draft = own_draft
        self._local_drafters = local_drafters
        self._intake = intake
        self._recorder = recorder
        self._fault = fault

    def draft(self, ready: Sequence[TargetSession], pacing: Pacing) -> None:
        """Ask the draft in this process if a call is worth its time. Needs `OwnDraft.is_there`.

        Drafters that gain more tokens per second are asked before it, which lowers its headroom; `gather` asks the
        others after it.
        """
        draft = self._own_draft
        due = [session for session in ready if session.state is SessionState.DECIDED]
        if not due:
            return
        # In rejection mode a draft's chain comes first, as nothing can be verified beside it.
        coupled = [session for session in due if session.mode is VerifyMode.COUPLED]
        limit = max((most_accepted(session) for session in coupled), default=0)
        least_worth = pacing.expectations.worth_per_s(DRAFT_MODEL, draft.cost_s / len(due), limit)
        self._ask(coupled, pacing, least_worth)
        self._recorder.drafted(draft.propose(due, pacing))

    def gather(self, ready: Sequence[TargetSession], pacing: Pacing, now_s: float) -> None:
        """Hang forced tokens, arrived proposals and the drafters' offers on the sessions' trees."""
        for session in ready:
            if session.grammar is not None and session.state is SessionState.DECIDED and pacing.may_verify(session):
                self._try(session, hang_forced)
            if session.state is SessionState.ENDED:
                continue
            if session.session_id in self._own_draft.asked:
                headroom, num_nodes = pacing.expectations.headroom(session), len(session.tree)
                self._absorb(session, pacing, now_s)
                note_call(session, DRAFT_MODEL, headroom, num_nodes)
            elif session.arrived is not None:
                self._absorb(session, pacing, now_s)
        self._own_draft.asked.clear()
        self._host.steps.work()
        self._ask([session for session in ready if session.state is not SessionState.ENDED], pacing, 0.0)

    def _absorb(self, session: TargetSession, pacing: Pacing, now_s: float) -> None:
        self._host.steps.work_on([session.key])
        try:
            self._intake.absorb(session, pacing, now_s)
        except Exception as error:
            self._fault(session, error)

    def _ask(self, sessions: Sequence[TargetSession], pacing: Pacing, least_worth: float) -> None:
        self._local_drafters.propose(sessions, pacing, least_worth)
        for session in sessions:
            if session.grammar is not None:
                self._try(session, drop_illegal)

    def _try(self, session: TargetSession, act: Callable[[TargetSession], None]) -> None:
        try:
            act(session)
        except Exception as error:
            self._fault(session, error)
