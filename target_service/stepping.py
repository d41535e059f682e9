"""Steps of a target: chosen nodes are computed, tokens drawn, trees walked, tokens committed and told.

step:
    chosen = pacing.choose_trees             # which nodes to verify
    engine.launch                            # pass_chosen, blocks_copied, pass_begins (see engine.py)
    on a GPU: launch sampling, send_results, learn, fill masks, take_frames, until the pass is nearly over
    output = engine.collect
    decisions = decide(candidates)           # sample, walk the trees
    local drafters get drawn tokens and hidden states
    each session takes its tokens            # KV cache, tree
    owners are told                          # on a GPU during the next pass, if nothing waits for them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specdec.constraints.limits.faults import GrammarError
from specdec.engine.runner import PassObserver
from specdec.engine.scheduler import ScheduledItem
from specdec.engine.sequence import Sequence as EngineSequence
from specdec.engine.tree import NO_TREE
from specdec.replica.worker.build import BuiltEngine
from specdec.replica.worker.errors import constraint_failure, is_engines_own, non_finite_logits
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.isolation import FaultIsolation, IsolatedSteps, each_or_halves
from specdec.replica.worker.role import DuringPass
from specdec.target_service.admission import Admission
from specdec.target_service.candidates import CandidateReader
from specdec.target_service.committing import Commits
from specdec.target_service.masks import MaskFilling, worth_a_thread_s
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.records.step_record import StepRecord
from specdec.target_service.records.trace import trace_preemptions
from specdec.target_service.sample_and_walk import Candidate, Decision, Drawn, Undecided, decide, draw_behind
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.turn_times import TurnTimes

_DURING_SHARE = 0.75
"""Fraction of a step's expected time spent reading frames while the GPU computes; the rest is slack to launch sampling
before the GPU idles. Chosen, not measured."""


class TargetSteps(PassObserver):
    """Runs the steps of a target's sessions, and tells pacing and metrics of them."""

    def __init__(
        self,
        host: SessionHost[TargetSession],
        built: BuiltEngine,
        recorder: TargetRecorder,
        admission: Admission,
        pacing: Pacing,
        own_draft: OwnDraft,
        local_drafters: LocalDrafters,
        close: Callable[[TargetSession], None],
        on_fault: Callable[[TargetSession, Exception], None],
        *,
        is_alone: bool,
    ) -> None:
        """`close` frees a session that has ended, `on_fault` ends one whose part of the work raised. `is_alone`: no
        other rank takes part in steps."""
        self._host = host
        self._engine = built.engine
        self._compiler = built.grammars
        self._recorder = recorder
        self._admission = admission
        self.pacing = pacing
        self._own_draft = own_draft
        self._local_drafters = local_drafters
        self._close = close
        self._fault = on_fault
        self.sampler = built.sampler
        self.masks = MaskFilling(worth_a_thread_s(built.info.identity.device))
        self.times = TurnTimes(own_draft, admission.by_seq.values())
        self.commits = Commits(
            host, built.engine, recorder, close, on_fault, own_draft, local_drafters, admission.costs
        )
        self.isolated = IsolatedSteps(built.engine, self, is_alone=is_alone)
        self._apart = FaultIsolation[TargetSession](lambda session: session.num_tokens)
        self._reader = CandidateReader(host, built.engine, admission, on_fault)
        self._groups: list[list[TargetSession]] = []
        """Sessions that may step in this turn, in groups that share a step; sessions under isolation form their own."""
        self._pass_keys: list[bytes] = []
        """Keys of the sessions of the last pass."""
        self._drawn: Callable[[], Drawn] | None = None
        """Gives what was drawn behind the present pass."""

    def plan(self, ready: list[TargetSession], now_s: float) -> None:
        """Group the sessions that may step, and plan the next step's hold-offs."""
        self._groups = self._apart.groups(ready)
        for group in self._groups:
            try:
                self.pacing.plan(group, now_s)
            except Exception as error:
                self._give_up_trees(group, error)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next step is due; None: no session may step."""
        waits_s = [self.pacing.wait_s(group, now_s) for group in self._groups]
        return min([wait_s for wait_s in waits_s if wait_s is not None], default=None)

    def step(self, during: DuringPass) -> None:
        """Choose nodes, run the engine once, and commit what its logits decide.

        While a GPU computes the pass, `_during_pass` runs.
        """
        started_s = time.monotonic()
        groups = self._groups
        group, only = groups[0], None
        if len(groups) > 1:
            group = next((each for each in groups if self.pacing.wait_s(each, self.times.due_at_s) == 0), group)
            only = {session.seq.seq_id for session in group}
        self._apart.take(group)
        if self._host.defer_results and any(session.state is SessionState.PREFILL for session in group):
            during.send_results()  # launching a prompt's kernels takes long: the results need not wait for it
        self._host.defer_results = False
        try:
            self.pacing.count_vain_waits(group, self.times.due_at_s)
            chosen = self.pacing.choose_trees(group, started_s)
        except Exception as error:
            chosen = self._give_up_trees(group, error)
        try:
            if not self.isolated.launch(self._fault_of, only):
                return
            if self._engine.launch_pass is not None:
                self._during_pass(during, started_s)
            output = self.isolated.collect(self._fault_of)
        finally:
            self.masks.wait()
        if output is None:
            return
        by_seq = self._admission.by_seq
        preempted = self._admission.of(output.preempted)
        candidates, undecided = self._reader.read(output, lambda item: by_seq[item.seq.seq_id], chosen, started_s)

        drawn = self._tokens_drawn()

        def decide_some(some: list[Candidate]) -> list[Decision]:
            decided, spoiled = decide(some, output.logits, self.sampler, self.masks, drawn)
            undecided.extend(spoiled)
            return decided

        decisions = each_or_halves(
            candidates, decide_some, lambda candidate, error: self._fault(candidate.session, error)
        )
        self._local_drafters.read(decisions)
        self._local_drafters.charge(decisions, output.num_tokens, self.pacing.clock.rows)
        self._recorder.masks(self.masks.fill_s, self.masks.wait_s)
        self._local_drafters.feed(output, decisions, by_seq)
        elapsed_s = time.monotonic() - started_s
        record = StepRecord.of(
            output,
            decisions,
            by_seq,
            self.pacing.gate,
            preempted=preempted,
            due_at_s=self.times.due_at_s,
            elapsed_s=elapsed_s,
        )
        for decision in decisions:
            try:
                self.commits.take(decision, self.pacing, started_s, elapsed_s, self.times.due_at_s)
            except Exception as error:
                self._fault(decision.candidate.session, error)
        for each in undecided:
            self._fail_undecided(each)
        stepped = [decision.candidate.session for decision in decisions]
        self._admission.costs.settle(stepped, elapsed_s, self.masks.hidden_s)
        self._host.defer_results = self._steps_at_once()
        if not self._host.defer_results:
            self.commits.tell_all()
        record.turn_s = time.monotonic() - self.times.began_s
        trace_preemptions(record)
        self.times.ended(record)

    def _during_pass(self, during: DuringPass, started_s: float) -> None:
        """Work while a GPU computes the pass, independent of the pass's inputs and results.

        Owners are told of the step before, if they were not; pacing and metrics learn from it. The masks of this step
        are filled. Frames are read for the next step: proposals are parsed, and merged after this step's commits.
        Sessions may be opened and closed.
        """
        flight, self._drawn = self._engine.launched, None
        try:
            if flight is not None:
                self._drawn = draw_behind(flight, self._admission.by_seq, self.sampler)
        except Exception as error:
            self._sampling_failed(error)
        during.send_results()
        self.learn()
        self.masks.fill(self._engine.is_done)
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

    def _steps_at_once(self) -> bool:
        """Whether the next step can be launched before this one's results are sent."""
        if not self.works_behind:
            return False
        ready = [session for session in self._admission.by_seq.values() if session.seq.is_ready]
        return bool(ready) and not self.pacing.will_wait(ready)

    @property
    def works_behind(self) -> bool:
        """Whether a device computes the next step while the last one is told and learnt: no source of this process
        drafts first."""
        return not (self._engine.launch_pass is None or self._own_draft.is_there or self._local_drafters.has_drafters)

    def learn(self) -> None:
        """Let metrics and pacing learn of the last step, if they have not."""
        self.commits.learn_all()
        step = self.times.unlearnt
        if step is not None:
            self._recorder.step(step)
            payoff = step.payoff(self.pacing.clock.expected_plain_s(len(step.num_committed)))
            self._recorder.turn(step.turn_s - step.elapsed_s, payoff)
        self.times.learn(self.pacing)

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
        self._close(session)
        self._host.failed(session, failure)

    def _give_up_trees(self, sessions: Sequence[TargetSession], error: Exception) -> dict[str, list[int]]:
        """Drop the sessions' trees for one step, as the faulty proposal is not known; returns no chosen nodes."""
        self._host.faults.note(error)
        for session in sessions:
            session.tree.clear()
            session.seq.tree = None
            if session.state is not SessionState.PREFILL:  # nothing is planned before the first token
                session.plan(None)
        return {}

    def _fault_of(self, seq: EngineSequence, error: Exception) -> None:
        self._fault(self._admission.by_seq[seq.seq_id], error)

    def pass_chosen(self, sequences: list[EngineSequence]) -> None:
        """Note the keys of the pass's sessions."""
        self._pass_keys = [session.key for session in self._admission.of(sequences)]
        self._host.steps.work_on(self._pass_keys)

    def blocks_copied(self, pairs: list[tuple[int, int]]) -> None:
        """Let heads copy the same blocks of their caches."""
        self._local_drafters.copied(pairs)

    def pass_begins(self, items: list[ScheduledItem]) -> None:
        """Begin to fill the masks of the pass's constraints."""
        self.masks.begin(
            (session, item.seq.tree or NO_TREE, item.num_tree_nodes)
            for item in items
            if item.completes and (session := self._admission.by_seq[item.seq.seq_id]).grammar is not None
        )
