"""The target's role over the engine: sessions in, one ragged step over all of them, verdicts out.

A turn, as `specdec/replica/worker/loop.py` calls it:

    absorb_proposals            # proposals join their sessions' trees; hold-offs are planned
    wait_s                      # 0: a step is due
    step:
        chosen = pacing.choose_trees             # which nodes to verify
        engine.launch                            # pass_chosen, blocks_copied, pass_begins (see engine.py)
        on a GPU: launch sampling, send_results, fill masks, take_frames, until the pass is nearly over
        output = engine.collect
        decisions = decide(candidates)           # sample, walk the trees
        local drafters get drawn tokens and hidden states
        each session takes its tokens            # KV cache, tree
    tell_results                                 # verdicts; on a GPU during the next pass, if nothing waits for them
    _learn                                       # metrics and pacing; on a GPU during the next pass
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from specdec.config import TargetSettings
from specdec.constraints.grammar.awaited import POLL_S
from specdec.constraints.limits.faults import GrammarError
from specdec.drafting.heads.target import HeadTarget
from specdec.engine.runner import PassObserver
from specdec.engine.scheduler import ScheduledItem
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree
from specdec.replica.worker.build import BuiltEngine
from specdec.replica.worker.errors import constraint_failure, is_engines_own, non_finite_logits
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.isolation import FaultIsolation, IsolatedSteps, each_or_halves
from specdec.replica.worker.opening import check_room
from specdec.replica.worker.role import DuringPass, Role
from specdec.replica.worker.sessions import Owner
from specdec.target_service.admission import Admission, new_session, sources_of
from specdec.target_service.candidates import CandidateReader
from specdec.target_service.committing import Commits
from specdec.target_service.masks import MaskFilling, worth_a_thread_s
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.gate_state import Phase
from specdec.target_service.proposals.gathering import Gathering
from specdec.target_service.proposals.intake import ProposalIntake
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.proposals.swap import DrafterSwap
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.records.step_record import StepRecord
from specdec.target_service.records.trace import trace_end, trace_preemptions
from specdec.target_service.sample_and_walk import Candidate, Decision, Drawn, Undecided, decide, draw_behind
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.turn_times import TurnTimes
from specdec.target_service.verdicts import describe_progress, due_for_progress, end_position
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import microseconds

_DURING_SHARE = 0.75
"""Fraction of a step's expected time spent reading frames while the GPU computes; the rest is slack to launch sampling
before the GPU idles. Chosen, not measured."""


class Verifier(Role[TargetSession], PassObserver):
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
        self._sampler = built.sampler
        self._identity = built.info.identity
        self._settings = settings
        self._recorder = recorder
        self._apart = FaultIsolation[TargetSession](lambda session: session.num_tokens)
        self._masks = MaskFilling(worth_a_thread_s(self._identity.device))
        self._groups: list[list[TargetSession]] = []
        """Sessions that may step in this turn, in groups that share a step; sessions under isolation form their own."""
        self._pass_keys: list[bytes] = []
        """Keys of the sessions of the last pass."""
        self._drawn: Callable[[], Drawn] | None = None
        """Gives what was drawn behind the present pass."""
        self._admission = Admission(host.sessions, built.engine, built.grammars, self._fault)
        self._turn_times = TurnTimes(self._own_draft, self._admission.by_seq.values())
        self._compiler = built.grammars
        self._steps = IsolatedSteps(built.engine, self, is_alone=settings.tensor_parallel_size == 1)
        self._reader = CandidateReader(host, built.engine, self._admission, self._fault)
        heads = None if built.model is None else HeadTarget(built.model, built.engine, built.sampler)
        self.local_drafters = LocalDrafters(settings.drafters, recorder, heads)
        """The target's own drafters, which `SetDrafters` may replace while sessions run."""
        hold_off_ms = 0.0 if self._own_draft.is_there else settings.hold_off_ms
        # Read after the heads are loaded: a failed capture of their steps empties the edges.
        self.pacing = Pacing(hold_off_ms, is_gated=settings.adaptive_speculation, row_edges=built.row_edges)
        self.pacing.gate.computes_prompts = self._own_draft.is_there
        self._swap = DrafterSwap(self.local_drafters, host.answers, self._on_drafters, settings.load_timeout_s)
        self.calls = self._swap
        self._intake = ProposalIntake(host, recorder, lambda: self._commits.tell_all())
        self._proposals = Gathering(host, self._own_draft, self.local_drafters, self._intake, recorder, self._fault)
        self._commits = Commits(
            host,
            built.engine,
            recorder,
            self.close_session,
            self._fault,
            self._own_draft,
            self.local_drafters,
            self._admission.costs,
        )
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
            is_read = self._host.gpu_busy and self.pacing.may_verify(session)
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
        if not (self._works_behind and self._admission.ready()):
            self._learn()  # else it is done during the next pass
        self._recorder.write()
        stats = self._engine.stats()
        credit = self.pacing.draft_credit(self._settings.max_draft_tokens)
        num_suspended = sum(
            session.gate is not None and session.gate.phase is Phase.OFF for session in self._host.sessions
        )
        self._own_draft.load()
        self._recorder.load(stats, len(self._host.sessions), credit, num_suspended, self.pacing.gate.min_gain_tokens)
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
            step_us=microseconds(self.pacing.clock.rows.predict(max(1, stats.running))),
            drafters=pb.DrafterNames(names=self.local_drafters.names, options=self.local_drafters.told_options),
        )

    def tell_results(self) -> None:
        """Emit the verdicts of the last step."""
        self._commits.tell_all()

    def before_send(self) -> None:
        """Write all metrics if a choice has ended: its tokens are counted before its owner sees the end."""
        if self._commits.has_ended:
            self._learn()
            self._recorder.write()

    # --- steps

    def absorb_proposals(self, now_s: float) -> None:
        """Begin a turn: merge proposals into their sessions' trees, and plan the next step's hold-offs."""
        self._turn_times.due_at_s = now_s
        self._swap.poll()
        if not self._works_behind:
            self._learn()
        self._admission.poll()
        if self._own_draft.is_there:
            self._proposals.draft(self._admission.ready(), self.pacing)
        self._turn_times.began_s = time.monotonic()
        ready = self._admission.ready()
        self._proposals.gather(ready, self.pacing, now_s)
        if any(session.state is SessionState.ENDED for session in ready):
            ready = self._admission.ready()  # forks of ended sessions may step now
        self._groups = self._apart.groups(ready)
        for group in self._groups:
            try:
                self.pacing.plan(group, now_s)
            except Exception as error:
                self._give_up_trees(group, error)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next step or poll is due; None: not before a frame arrives."""
        waits_s = [wait_s for group in self._groups if (wait_s := self.pacing.wait_s(group, now_s)) is not None]
        idle_s = POLL_S if self._admission.is_compiling or self._swap.is_under_way else None
        return min(waits_s, default=idle_s)

    def step(self, during: DuringPass) -> None:
        """Choose nodes, run the engine once, and commit what its logits decide.

        While a GPU computes the pass, `_during_pass` runs.
        """
        started_s = time.monotonic()
        groups = self._groups
        group, only = groups[0], None
        if len(groups) > 1:
            group = next((each for each in groups if self.pacing.wait_s(each, self._turn_times.due_at_s) == 0), group)
            only = {session.seq.seq_id for session in group}
        self._apart.take(group)
        if self._host.defer_results and any(session.state is SessionState.PREFILL for session in group):
            during.send_results()  # launching a prompt's kernels takes long: the results need not wait for it
        self._host.defer_results = False
        try:
            self.pacing.count_vain_waits(group, self._turn_times.due_at_s)
            chosen = self.pacing.choose_trees(group, started_s)
        except Exception as error:
            chosen = self._give_up_trees(group, error)
        try:
            if not self._steps.launch(self._fault_of, only):
                return
            if self._engine.launch_pass is not None:
                self._during_pass(during, started_s)
            output = self._steps.collect(self._fault_of)
        finally:
            self._masks.wait()
        if output is None:
            return
        by_seq = self._admission.by_seq
        preempted = self._admission.of(output.preempted)
        candidates, undecided = self._reader.read(output, lambda item: by_seq[item.seq.seq_id], chosen, started_s)

        drawn = self._tokens_drawn()

        def decide_some(some: list[Candidate]) -> list[Decision]:
            decided, spoiled = decide(some, output.logits, self._sampler, self._masks, drawn)
            undecided.extend(spoiled)
            return decided

        decisions = each_or_halves(
            candidates, decide_some, lambda candidate, error: self._fault(candidate.session, error)
        )
        self.local_drafters.read(decisions)
        self.local_drafters.charge(decisions, output.num_tokens, self.pacing.clock.rows)
        self._recorder.masks(self._masks.fill_s, self._masks.wait_s)
        self.local_drafters.feed(output, decisions, by_seq)
        elapsed_s = time.monotonic() - started_s
        record = StepRecord.of(
            output,
            decisions,
            by_seq,
            self.pacing.gate,
            preempted=preempted,
            due_at_s=self._turn_times.due_at_s,
            elapsed_s=elapsed_s,
        )
        for decision in decisions:
            try:
                self._commits.take(decision, self.pacing, started_s, elapsed_s, self._turn_times.due_at_s)
            except Exception as error:
                self._fault(decision.candidate.session, error)
        for each in undecided:
            self._fail_undecided(each)
        stepped = [decision.candidate.session for decision in decisions]
        self._admission.costs.settle(stepped, elapsed_s, self._masks.hidden_s)
        self._host.defer_results = self._steps_at_once()
        if not self._host.defer_results:
            self._commits.tell_all()
        record.turn_s = time.monotonic() - self._turn_times.began_s
        trace_preemptions(record)
        self._turn_times.ended(record)

    def _during_pass(self, during: DuringPass, started_s: float) -> None:
        """Work while a GPU computes the pass, independent of the pass's inputs and results.

        Owners are told of the step before, if they were not; pacing and metrics learn from it. The masks of this step
        are filled. Frames are read for the next step: proposals are parsed, and merged after this step's commits.
        Sessions may be opened and closed.
        """
        flight, self._drawn = self._engine.launched, None
        try:
            if flight is not None:
                self._drawn = draw_behind(flight, self._admission.by_seq, self._sampler)
        except Exception as error:
            self._sampling_failed(error)
        during.send_results()
        self._learn()
        self._masks.fill(self._engine.is_done)
        until_s = started_s + _DURING_SHARE * self.pacing.clock.rows.predict(self._engine.num_launched_rows)
        during.take_frames(until_s, self._engine.is_done)
        self._host.steps.work_on(self._pass_keys)

    def _tokens_drawn(self) -> Drawn | None:
        """What was drawn behind the pass; None: nothing, or that failed, so that `decide` finds whose fault it is."""
        drawn, self._drawn = self._drawn, None
        try:
            return None if drawn is None else drawn()
        except Exception as error:
            self._sampling_failed(error)
            return None

    def _sampling_failed(self, error: Exception) -> None:
        if is_engines_own(error):
            raise error
        self._host.faults.note(error)

    @property
    def _works_behind(self) -> bool:
        """Whether a device computes the next step while the last one is told and learnt: no source of this process
        drafts first."""
        return not (self._engine.launch_pass is None or self._own_draft.is_there or self.local_drafters.has_drafters)

    def _steps_at_once(self) -> bool:
        """Whether the next step can be launched before this one's results are sent."""
        if not self._works_behind:
            return False
        ready = [session for session in self._admission.by_seq.values() if session.seq.is_ready]
        return bool(ready) and not self.pacing.will_wait(ready)

    def _learn(self) -> None:
        """Let metrics and pacing learn of the last step, if they have not."""
        self._commits.learn_all()
        step = self._turn_times.unlearnt
        if step is not None:
            self._recorder.step(step)
            payoff = step.payoff(self.pacing.clock.expected_plain_s(len(step.num_committed)))
            self._recorder.turn(step.turn_s - step.elapsed_s, payoff)
        self._turn_times.learn(self.pacing)

    def _fail_undecided(self, undecided: Undecided) -> None:
        """End a session that cannot be decided on; after NaN its KV is never shared."""
        session = undecided.session
        if isinstance(undecided.error, GrammarError):
            failure = constraint_failure(undecided.error, expected_position=session.num_tokens)
            if self._compiler is not None:
                self._compiler.figures.refused(undecided.error)
        else:
            failure = non_finite_logits(undecided.error, expected_position=session.num_tokens)
            self._engine.distrust(session.seq)
        self.close_session(session)
        self._host.failed(session, failure)

    # --- faults

    def _fault(self, session: TargetSession, error: Exception) -> None:
        """End a session with the error that its part of the work raised."""
        failure = self._host.faults.failure(error)
        if session.state is SessionState.ENDED:
            return
        self.close_session(session)
        self._host.failed(session, failure)

    def _fault_of(self, seq: Sequence, error: Exception) -> None:
        self._fault(self._admission.by_seq[seq.seq_id], error)

    def _give_up_trees(self, sessions: list[TargetSession], error: Exception) -> dict[str, list[int]]:
        """Drop the sessions' trees for one step, as the faulty proposal is not known; returns no chosen nodes."""
        self._host.faults.note(error)
        for session in sessions:
            session.tree.clear()
            session.seq.tree = None
            if session.state is not SessionState.PREFILL:  # nothing is planned before the first token
                session.plan(None)
        return {}

    # --- details

    def pass_chosen(self, sequences: list[Sequence]) -> None:
        """Note the keys of the pass's sessions."""
        self._pass_keys = [session.key for session in self._admission.of(sequences)]
        self._host.steps.work_on(self._pass_keys)

    def blocks_copied(self, pairs: list[tuple[int, int]]) -> None:
        """Let heads copy the same blocks of their caches."""
        self.local_drafters.copied(pairs)

    def pass_begins(self, items: list[ScheduledItem]) -> None:
        """Begin to fill the masks of the pass's constraints."""
        self._masks.begin(
            (session, item.seq.tree or TokenTree(), item.num_tree_nodes)
            for item in items
            if item.completes and (session := self._admission.by_seq[item.seq.seq_id]).grammar is not None
        )

    def _on_drafters(self, new: Iterable[str]) -> None:
        """Forget the records of new drafters' names, and let the gate judge all sessions anew."""
        for name in new:
            self.pacing.expectations.forget(name)
        for session in self._host.sessions:
            session.sources = sources_of(session.body, session.wanted_drafters, self.local_drafters.names)
            session.gate = None
