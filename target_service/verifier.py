"""The target's role over the engine: sessions in, one ragged step over all of them, verdicts out.

A turn, as `specdec/replica/worker/loop.py` calls it:

    absorb_proposals            # proposals join their sessions' trees; hold-offs are planned
    wait_s                      # 0: a step is due
    step                        # see `stepping.py`
    tell_results                # verdicts; on a GPU during the next pass, if nothing waits for them
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from specdec.config import TargetSettings
from specdec.constraints.grammar.awaited import POLL_S
from specdec.drafting.heads.target import HeadTarget
from specdec.replica.worker.build import BuiltEngine
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.opening import check_room
from specdec.replica.worker.role import DuringPass, Role
from specdec.replica.worker.sessions import Owner
from specdec.target_service.admission import Admission, new_session, sources_of
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.gate_state import Phase
from specdec.target_service.proposals.gathering import Gathering
from specdec.target_service.proposals.intake import ProposalIntake
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.proposals.swap import DrafterSwap
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.records.trace import trace_end
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.stepping import TargetSteps
from specdec.target_service.verdicts import describe_progress, due_for_progress, end_position
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import microseconds


class Verifier(Role[TargetSession]):
    """Decodes all sessions of a target, and verifies the proposals for them.

    Guarantee: in coupled mode a session's tokens are a function of the model, its numerics, prompt, parameters, seed
    and choice; proposals change only the number of steps.
    """

    def __init__(
        self,
        host: SessionHost[TargetSession],
        built: BuiltEngine,
        settings: TargetSettings,
        recorder: TargetRecorder,
        own_draft: OwnDraft | None = None,
    ) -> None:
        """`own_draft`: the draft in this process for `host`'s sessions; None: only draft services send proposals."""
        self._own_draft = own_draft or OwnDraft(None, 0)
        self._host = host
        self._engine = built.engine
        self._identity = built.info.identity
        self._settings = settings
        self._recorder = recorder
        self._admission = Admission(host.sessions, built.engine, built.grammars, self._fault)
        self._compiler = built.grammars
        heads = None if built.model is None else HeadTarget(built.model, built.engine, built.sampler)
        self.local_drafters = LocalDrafters(settings.drafters, recorder, heads)
        """The target's own drafters, which `SetDrafters` may replace while sessions run."""
        hold_off_ms = 0.0 if self._own_draft.is_there else settings.hold_off_ms
        # Read after the heads are loaded: a failed capture of their steps empties the edges.
        pacing = Pacing(hold_off_ms, is_gated=settings.adaptive_speculation, row_edges=built.row_edges)
        pacing.gate.computes_prompts = self._own_draft.is_there
        self.steps = TargetSteps(
            host,
            built,
            recorder,
            self._admission,
            pacing,
            self._own_draft,
            self.local_drafters,
            self.close_session,
            self._fault,
            is_alone=settings.tensor_parallel_size == 1,
        )
        self._commits = self.steps.commits
        self._swap = DrafterSwap(self.local_drafters, host.answers, self._on_drafters, settings.load_timeout_s)
        self.calls = self._swap
        self._intake = ProposalIntake(host, recorder, self._commits.tell_all)
        self._proposals = Gathering(host, self._own_draft, self.local_drafters, self._intake, recorder, self._fault)
        recorder.serves(self._identity)

    # --- sessions

    def open_session(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> TargetSession:
        """Check and admit a session. A fork of a prompt in prefill waits for the prompt, then shares its KV.

        Raises SessionFailure: a field is invalid, or there is no room.
        """
        settings = self._settings
        check_room(len(self._host.sessions), settings.max_sessions)
        session = new_session(
            owner,
            session_id,
            epoch,
            body,
            identity=self._identity,
            settings=settings,
            drafters=self.local_drafters.names,
            now_s=time.monotonic(),
            piece_bytes=self._host.piece_bytes(owner),
        )
        self._recorder.opened()
        self._admission.open(session, body)
        return session

    def position(self, session: TargetSession) -> int:
        """Number of committed tokens."""
        return session.num_tokens

    def token_ids(self, session: TargetSession) -> list[int]:
        """The committed tokens, prompt included."""
        self._commits.tell_all()
        return session.token_ids

    def entry(self, session: TargetSession, kind: str, body: Any) -> None:
        """Take a proposal, or more credit."""
        if kind == "proposal":
            if self._own_draft.is_there:
                return
            session.has_draft = True
            is_read = self._host.gpu_busy and self.steps.pacing.may_verify(session)
            session.arrived = self._intake.read_proposal(session, body) if is_read else body
        elif kind == "credit":
            session.credit_position = max(session.credit_position, body.position)
            while session.sent and end_position(session.sent[0]) <= body.acknowledged_position:
                session.sent.popleft()
            if session.prompt_logprobs is not None:
                session.prompt_logprobs.credited(body)
            session.update_pause()

    def close_session(self, session: TargetSession) -> None:
        """Free the sequence; its full blocks stay in the prefix cache."""
        self._commits.tell_all()
        if session.trace is not None:
            trace_end(session.trace, session)
        self._own_draft.closed(session)
        self.local_drafters.closed(session)
        self._admission.end(session)
        if not (session.sent and session.sent[-1].finish_reason):
            self._recorder.aborted()

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Ignored: a target's frames have only entries."""

    def update_pause(self, session: TargetSession) -> None:
        """Pause or resume a session as its owner and its credit allow."""
        session.update_pause()

    def resend(self, session: TargetSession, seen: pb.AttachedSession) -> None:
        """Send again the messages that the owner has not seen: the prompt's log-probabilities, then verdicts."""
        if session.prompt_logprobs is not None:
            for part in session.prompt_logprobs.unseen(seen.prompt_logprobs_position):
                self._host.emit(session, prompt_logprobs=part)
        for verdict in session.sent:
            if end_position(verdict) > seen.committed_length:
                self._host.emit(session, verdict=verdict)

    def load(self) -> pb.LoadReport:
        """The engine's load; also exports metrics, and sends progress messages that are due."""
        if not (self.steps.works_behind and self._admission.ready()):
            self.steps.learn()  # else it is done during the next pass
        self._recorder.write()
        stats = self._engine.stats()
        credit = self.steps.pacing.draft_credit(self._settings.max_draft_tokens)
        num_suspended = sum(
            session.gate is not None and session.gate.phase is Phase.OFF for session in self._host.sessions
        )
        self._own_draft.load()
        self._recorder.load(
            stats, len(self._host.sessions), credit, num_suspended, self.steps.pacing.gate.min_gain_tokens
        )
        self._recorder.grammars(self._compiler)
        for session in due_for_progress(self._host.sessions, time.monotonic()):
            self._host.emit(session, progress=describe_progress(session))
        return pb.LoadReport(
            num_running=stats.running,
            num_waiting=stats.waiting + self._admission.num_waiting,
            kv_blocks_used=stats.blocks_used,
            kv_blocks_total=stats.blocks_total,
            num_sessions=len(self._host.sessions),
            max_sessions=self._settings.max_sessions,
            num_waiting_tokens=self._engine.num_waiting_tokens(),
            draft_credit=credit,
            step_us=microseconds(self.steps.pacing.clock.rows.predict(max(1, stats.running))),
            drafters=pb.DrafterNames(names=self.local_drafters.names, options=self.local_drafters.told_options),
        )

    def tell_results(self) -> None:
        """Emit the verdicts of the last step."""
        self._commits.tell_all()

    def before_send(self) -> None:
        """Write all metrics if a choice has ended: its tokens are counted before its owner sees the end."""
        if self._commits.has_ended:
            self.steps.learn()
            self._recorder.write()

    # --- steps

    def absorb_proposals(self, now_s: float) -> None:
        """Begin a turn: merge proposals into their sessions' trees, and plan the next step's hold-offs."""
        self.steps.times.due_at_s = now_s
        self._swap.poll()
        if not self.steps.works_behind:
            self.steps.learn()
        self._admission.poll()
        if self._own_draft.is_there:
            self._proposals.draft(self._admission.ready(), self.steps.pacing)
        self.steps.times.began_s = time.monotonic()
        ready = self._admission.ready()
        self._proposals.gather(ready, self.steps.pacing, now_s)
        if any(session.state is SessionState.ENDED for session in ready):
            ready = self._admission.ready()  # forks of ended sessions may step now
        self.steps.plan(ready, now_s)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next step or poll is due; None: not before a frame arrives."""
        wait_s = self.steps.wait_s(now_s)
        if wait_s is None and (self._admission.is_compiling or self._swap.is_under_way):
            return POLL_S
        return wait_s

    def step(self, during: DuringPass) -> None:
        """Choose nodes, run the engine once, and commit what its logits decide."""
        self.steps.step(during)

    # --- faults

    def _fault(self, session: TargetSession, error: Exception) -> None:
        """End a session with the error that its part of the work raised."""
        failure = self._host.faults.failure(error)
        if session.state is SessionState.ENDED:
            return
        self.close_session(session)
        self._host.failed(session, failure)

    # --- details

    def _on_drafters(self, new: Iterable[str]) -> None:
        """Forget the records of new drafters' names, and let the gate judge all sessions anew."""
        for name in new:
            self.steps.pacing.expectations.forget(name)
        for session in self._host.sessions:
            session.sources = sources_of(session.body, session.wanted_drafters, self.local_drafters.names)
            session.gate = None
