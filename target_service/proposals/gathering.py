"""Everything that is proposed before a step, gathered on the sessions' trees.

In this order: the target's own drafters and draft, which think now; what a constraint leaves no choice about; what
draft services sent; and the own drafters for all others. What a constraint rules out is dropped from what each brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.sampling_params import VerifyMode
from specdec.worker.host import SessionHost
from target_service.pacing import Pacing
from target_service.proposals.intake import ProposalIntake
from target_service.proposals.legal import drop_illegal, hang_forced
from target_service.proposals.own_draft import OwnDraft
from target_service.proposals.panel import DrafterPanel
from target_service.session import SessionState, TargetSession


class Gathering:
    """Asks all sources. A session whose part of it fails is ended by `fault`, and no other."""

    def __init__(
        self,
        host: SessionHost[TargetSession],
        own_draft: OwnDraft,
        panel: DrafterPanel,
        intake: ProposalIntake,
        fault: Callable[[TargetSession, Exception], None],
    ) -> None:
        self._host = host
        self._own_draft = own_draft
        self._panel = panel
        self._intake = intake
        self._fault = fault

    def draft(self, ready: Sequence[TargetSession], pacing: Pacing) -> None:
        """Let the draft in this process guess, if there is one and any session needs it."""
        if not self._own_draft.is_there:
            return
        due = [session for session in ready if session.state is SessionState.DECIDED]
        # In rejection mode a draft's chain comes first, as nothing can be verified beside it.
        self._ask([session for session in due if session.mode is VerifyMode.COUPLED], pacing)
        if not all(pacing.needs_no_draft(session) for session in due):
            self._own_draft.propose(due, pacing)

    def gather(self, ready: Sequence[TargetSession], pacing: Pacing, now_s: float) -> None:
        """Hang what is forced, what has arrived, and what own drafters offer."""
        for session in ready:
            if session.grammar is not None and session.state is SessionState.DECIDED and pacing.may_verify(session):
                self._try(session, hang_forced)
            if session.arrived is not None and session.state is not SessionState.ENDED:
                self._host.steps.work_on([session.key])
                self._try(session, lambda one: self._intake.absorb(one, pacing, now_s))
        self._host.steps.work()
        self._ask([session for session in ready if session.state is not SessionState.ENDED], pacing)

    def _ask(self, sessions: Sequence[TargetSession], pacing: Pacing) -> None:
        self._panel.propose(sessions, pacing)
        for session in sessions:
            if session.grammar is not None:
                self._try(session, drop_illegal)

    def _try(self, session: TargetSession, act: Callable[[TargetSession], None]) -> None:
        try:
            act(session)
        except Exception as error:
            self._fault(session, error)
