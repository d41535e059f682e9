"""The target's role over the engine: sessions in, one ragged step over all of them, verdicts out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from specdec.config import TargetSettings
from specdec.engine.errors import EngineError
from specdec.engine.scheduler import ScheduledItem
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree
from specdec.grammar.awaited import POLL_S, AwaitedGrammars
from specdec.grammar.failure import GrammarError
from specdec.v1 import common_pb2 as pb
from specdec.worker.build import BuiltEngine
from specdec.worker.clamping import microseconds
from specdec.worker.errors import constraint_failure, invalid, non_finite_logits
from specdec.worker.host import SessionHost
from specdec.worker.isolation import ApartTurns, IsolatedSteps, each_or_halves
from specdec.worker.opening import check_room
from specdec.worker.sessions import Owner
from target_service.candidates import CandidateReader
from target_service.commits import Commits
from target_service.decide import Candidate, Decision, Undecided, decide
from target_service.forks import Forks, may_fork
from target_service.masks import MaskFilling, worth_a_thread_s
from target_service.opening import new_session, sources_of
from target_service.pacing.pacing import Pacing
from target_service.policy.gate_state import Phase
from target_service.proposals.gathering import Gathering
from target_service.proposals.intake import ProposalIntake
from target_service.proposals.own_draft import OwnDraft
from target_service.proposals.panel import DrafterPanel
from target_service.proposals.swap import POLL_S as SWAP_POLL_S
from target_service.proposals.swap import DrafterSwap
from target_service.records.metrics import TargetRecorder
from target_service.records.progress import describe_progress, due_for_progress
from target_service.records.recording import StepRecording
from target_service.records.step_record import StepObserver, StepRecord
from target_service.records.trace import trace_end, trace_preemptions
from target_service.session import SessionState, TargetSession
from target_service.verdicts import end_position

_STARVED_S = 1.0
"""A session that has had no step for so long waits for its client."""
_BESIDE_SHARE = 0.75
"""For so much of a step's expected time frames are taken while a device computes it: sampling is to be launched before
the device has nothing left to do. Chosen, not measured."""


class Verifier:
    """Decodes all sessions of a target and verifies what drafts propose for them.

    Guarantee: in coupled mode a session's tokens are a function of the model, its numerics, prompt, parameters, seed
    and choice; proposals change only how many steps they take.
    """

    def __init__(
        self,
        host: SessionHost[TargetSession],
        built: BuiltEngine,
        settings: TargetSettings,
        recorder: TargetRecorder,
        own_draft: OwnDraft | None = None,
    ) -> None:
        """`own_draft`: of `host`'s sessions, in this process; None: drafts are elsewhere."""
        self._own_draft = own_draft or OwnDraft(None, 0)
        hold_off_ms = 0.0 if self._own_draft.is_there else settings.hold_off_ms
        self.pacing = Pacing(hold_off_ms, is_gated=settings.adaptive_speculation, row_edges=built.row_edges)
        self.pacing.gate.computes_prompts = self._own_draft.is_there
        self._host = host
        self._engine = built.engine
        self._sampler = built.sampler
        self._identity = built.info.identity
        self._settings = settings
        self._recorder = recorder
        self._by_seq: dict[int, TargetSession] = {}
        self._apart = ApartTurns[TargetSession](lambda session: session.num_tokens)
        self._masks = MaskFilling(worth_a_thread_s(self._identity.device))
        self._pass_keys: list[bytes] = []
        """Of the sessions that the last pass was for."""
        built.engine.before_pass = self._note_pass
        built.engine.beside_pass = self._begin_masks
        self._recording = StepRecording(recorder)
        host.before_send = self._recording.write
        self._due_at_s = 0.0
        self._turn_began_s = 0.0
        self._last_turn_s: float | None = None
        """When the last turn with a step ended, if it left something to do."""
        self._forks = Forks()
        self._grammars = AwaitedGrammars[TargetSession](
            built.grammars,
            _output_of,
            self._admit,
            self._fault,
            None if built.grammars is None else built.grammars.figures,
        )
        self._compiler = built.grammars
        self._steps = IsolatedSteps(built.engine, is_alone=settings.tensor_parallel_size == 1)
        self._reader = CandidateReader(host, built.engine, self._forks, self._register, self._fault)
        self.panel = DrafterPanel(settings.drafters, self._identity.vocab_size, recorder, built.heads)
        """The drafters of its own; they may be changed while sessions run."""
        self._swap = DrafterSwap(self.panel, host.answers, self._on_drafters, settings.load_timeout_s)
        host.answers.handler = self._swap
        self._intake = ProposalIntake(host, recorder)
        self._proposals = Gathering(host, self._own_draft, self.panel, self._intake, recorder, self._fault)
        self._commits = Commits(host, built.engine, recorder, self.close, self._own_draft, self.panel)
        self._observers: tuple[StepObserver, ...] = (
            trace_preemptions,
            self._record,
            self._fit_step_time,
            self._observe_gate,
        )
        recorder.serves(self._identity)

    # --- sessions

    def open(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> TargetSession:
        """Check and admit a session. A fork of a prompt in prefill waits for it; its KV is then shared."""
        settings = self._settings
        check_room(len(self._host.sessions), settings.max_sessions)
        session = new_session(
            owner,
            session_id,
            epoch,
            body,
            identity=self._identity,
            settings=settings,
            drafters=self.panel.names,
            now_s=time.monotonic(),
            piece_bytes=self._host.piece_bytes(owner),
        )
        self._recorder.opened()
        self._grammars.open(session, body)
        return session

    def position(self, session: TargetSession) -> int:
        """Number of committed tokens."""
        return session.num_tokens

    def entry(self, session: TargetSession, kind: str, body: Any) -> None:
        """A proposal, or more credit."""
        if kind == "proposal":
            if self._own_draft.is_there:
                return
            session.has_draft = True
            is_read = self._host.is_beside and self.pacing.may_verify(session)
            session.arrived = self._intake.read(session, body) if is_read else body
            self._recording.payoff.proposal_came(self._due_at_s)
        elif kind == "credit":
            session.credit_position = max(session.credit_position, body.position)
            while session.sent and end_position(session.sent[0]) <= body.acknowledged_position:
                session.sent.popleft()
            if session.prompt_logprobs is not None:
                session.prompt_logprobs.credited(body)
            session.update_pause()

    def close(self, session: TargetSession) -> None:
        """Free the sequence; its full blocks stay in the prefix cache."""
        if session.trace is not None:
            trace_end(session.trace, session)
        self._grammars.drop(session)
        self._forks.drop(session)
        self._own_draft.closed(session)
        self.panel.closed(session)
        if (seq := session.finish()) is not None:
            del self._by_seq[seq.seq_id]
            self._engine.free(seq)
        if not (session.sent and session.sent[-1].finish_reason):
            self._recorder.aborted()
        for orphan in self._forks.take(session.session_id):
            self._start(orphan)

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Frames carry nothing for a target besides their entries."""

    def update_pause(self, session: TargetSession) -> None:
        """Sessions whose owner cannot be told take part in no step."""
        session.update_pause()

    def resend(self, session: TargetSession, seen: pb.AttachedSession) -> None:
        """Emit again what the owner has not seen: log-probabilities of the prompt, then verdicts."""
        if session.prompt_logprobs is not None:
            for part in session.prompt_logprobs.unseen(seen.prompt_logprobs_position):
                self._host.emit(session, prompt_logprobs=part)
        for verdict in session.sent:
            if end_position(verdict) > seen.committed_length:
                self._host.emit(session, verdict=verdict)

    def load(self) -> pb.LoadReport:
        """Load of the engine; exports the gauges too."""
        stats = self._engine.stats()
        credit = self.pacing.draft_credit(self._settings.max_draft_tokens)
        num_suspended = sum(
            session.gate is not None and session.gate.phase is Phase.OFF for session in self._host.sessions
        )
        self._own_draft.load()
        self._recorder.load(stats, len(self._host.sessions), credit, num_suspended, self.pacing.gate.price)
        self._recorder.grammars(self._compiler)
        for session in due_for_progress(self._host.sessions, time.monotonic()):
            self._host.emit(session, progress=describe_progress(session))
        return pb.LoadReport(
            num_running=stats.running,
            num_waiting=stats.waiting + len(self._forks) + len(self._grammars),
            kv_blocks_used=stats.blocks_used,
            kv_blocks_total=stats.blocks_total,
            num_sessions=len(self._host.sessions),
            max_sessions=self._settings.max_sessions,
            num_waiting_tokens=self._engine.num_waiting_tokens(),
            draft_credit=credit,
            step_us=microseconds(self.pacing.step_time.predict(max(1, stats.running))),
            drafters=pb.DrafterNames(names=self.panel.names, options=self.panel.told_options),
        )

    # --- steps

    def absorb_proposals(self, now_s: float) -> None:
        """A turn begins: proposals that have arrived join their trees, and the next step's hold-offs are planned."""
        self._due_at_s = now_s
        self._swap.poll()
        self._grammars.poll()
        self._proposals.draft(self._ready(), self.pacing)
        self._turn_began_s = time.monotonic()
        self._proposals.gather(self._ready(), self.pacing, now_s)
        for group in self._groups():
            try:
                self.pacing.plan(group, now_s)
            except Exception as error:
                self._give_up_trees(group, error)

    def wait_s(self, now_s: float) -> float | None:
        """When the next step is due: now, after a hold-off, or not before a frame arrives."""
        waits_s = [wait_s for group in self._groups() if (wait_s := self.pacing.wait_s(group, now_s)) is not None]
        idle_s = POLL_S if len(self._grammars) else SWAP_POLL_S if self._swap.is_under_way else None
        return min(waits_s, default=idle_s)

    def step(self) -> None:
        """Choose what to verify, run the engine once, turn its logits into verdicts, and tell the observers.

        Where a device computes the pass, `_work_beside` is what happens meanwhile.
        """
        started_s = time.monotonic()
        groups = self._groups()
        group, only = groups[0], None
        if len(groups) > 1:
            group = next((each for each in groups if self.pacing.wait_s(each, self._due_at_s) == 0), group)
            only = {session.seq.seq_id for session in group}
        self._apart.take(group)
        if self._host.sends_later and any(session.state is SessionState.PREFILL for session in group):
            self._host.send_results()  # kernels of a prompt are launched one by one: nobody waits for that
        self._host.sends_later = False
        try:
            chosen = self.pacing.choose_trees(group, started_s)
        except Exception as error:
            chosen = self._give_up_trees(group, error)
        try:
            if not self._steps.launch(self._fault_of, only):
                return
            if self._engine.launch_pass is not None:
                self._work_beside(started_s)
            output = self._steps.collect(self._fault_of)
        finally:
            self._masks.wait()
        if output is None:
            return
        preempted = [self._by_seq[seq.seq_id] for seq in output.preempted]
        candidates, undecided = self._reader.read(output, lambda item: self._by_seq[item.seq.seq_id], chosen, started_s)

        def decide_some(some: list[Candidate]) -> list[Decision]:
            decided, spoiled = decide(some, output.logits, self._sampler, self._masks)
            undecided.extend(spoiled)
            return decided

        decisions = each_or_halves(
            candidates, decide_some, lambda candidate, error: self._fault(candidate.session, error)
        )
        self.panel.read(decisions, output.logits)
        self.panel.charge(decisions, output.num_tokens, self.pacing.step_time)
        self._recorder.masks(self._masks.fill_s, self._masks.wait_s)
        self.panel.feed(output, decisions, self._by_seq)
        elapsed_s = time.monotonic() - started_s
        gates = [decision.candidate.session.gate for decision in decisions]
        # All are of before the verdicts, which end hold-offs and prefills.
        held_s = max((decision.candidate.session.held_s(self._due_at_s) for decision in decisions), default=0.0)
        are_free = [
            decision.candidate.num_nodes > 0 and not self.pacing.gate.is_open(gate)
            for decision, gate in zip(decisions, gates, strict=True)
        ]
        is_decode = all(
            item.num_new_tokens <= 1
            and (session := self._by_seq.get(item.seq.seq_id)) is not None
            and session.state is not SessionState.PREFILL
            for item in output.items
        )
        for decision in decisions:
            try:
                self._commits.commit(decision, self.pacing, started_s, elapsed_s, self._due_at_s)
            except Exception as error:
                self._fault(decision.candidate.session, error)
        for each in undecided:
            self._fail_undecided(each)
        self._host.sends_later = self._steps_at_once()
        record = StepRecord(
            output=output,
            preempted=preempted,
            due_at_s=self._due_at_s,
            elapsed_s=elapsed_s,
            turn_s=time.monotonic() - self._turn_began_s,
            held_s=held_s,
            num_committed=[len(decision.walk.token_ids) for decision in decisions],
            gates=gates,
            num_nodes=sum(decision.candidate.num_nodes for decision in decisions),
            are_free=are_free,
            is_decode=is_decode,
            is_plain=not any(decision.candidate.num_nodes for decision in decisions),
            drafts_may_work=any(self.pacing.may_verify(session) for session in self._host.sessions),
        )
        for observe in self._observers:
            observe(record)

    def _work_beside(self, started_s: float) -> None:
        """What is done while a device computes the pass: nothing that the pass depends on, or that depends on it.

        What the step before decided is counted and sent. Masks of this one's constraints are filled. What arrives is
        for the next step: proposals are read, and hang below the verdict of this one when there is one. Sessions may
        come and go.
        """
        self._host.send_results()
        self._masks.fill()
        until_s = started_s + _BESIDE_SHARE * self.pacing.step_time.predict(self._engine.num_launched_rows)
        self._host.take_frames(until_s, self._engine.is_done)
        self._host.steps.work_on(self._pass_keys)

    def _steps_at_once(self) -> bool:
        """Whether the next step can be launched before what this one decided is sent: nothing drafts here first."""
        if self._engine.launch_pass is None or self._own_draft.is_there or self.panel.has_drafters:
            return False
        return bool(self._ready())

    def _fail_undecided(self, undecided: Undecided) -> None:
        """End a session that cannot be decided on; its KV may be NaN, so nobody else shall go on from it."""
        session = undecided.session
        if isinstance(undecided.error, GrammarError):
            failure = constraint_failure(undecided.error, expected_position=session.num_tokens)
            if self._compiler is not None:
                self._compiler.figures.refused(undecided.error)
        else:
            failure = non_finite_logits(undecided.error, expected_position=session.num_tokens)
            self._engine.distrust(session.seq)
        self.close(session)
        self._host.failed(session, failure)

    # --- observers of steps

    def _record(self, step: StepRecord) -> None:
        self._recording.observe(step, self.pacing.step_time)

    def _fit_step_time(self, step: StepRecord) -> None:
        # What proposals cost besides the forward pass counts, too: merging them before, their verdicts after it.
        self.pacing.observe_step(step.output.num_tokens, step.turn_s)

    def _observe_gate(self, step: StepRecord) -> None:
        # From turn to turn: what lies between two, such as hold-offs and frames, is part of what speculation costs.
        now_s = time.monotonic()
        prompt_s = self._own_draft.take_prompt_s()
        if self._last_turn_s is None:  # there was nothing to do: it begins after the draft's work
            self._last_turn_s, prompt_s = self._turn_began_s, 0.0
        began_s, self._last_turn_s = self._last_turn_s, now_s if self._ready() else None
        if step.is_decode:
            self.pacing.expectations.observe_rate(sum(step.num_committed), now_s - began_s - prompt_s)
        if not step.is_decode or not self.pacing.gate.is_gating:
            return
        decoding = [
            session
            for session in self._by_seq.values()
            if (told_s := session.times.last_verdict_at_s) is not None and now_s - told_s < _STARVED_S
        ]
        self.pacing.gate.observe_turn(
            step.gates,
            num_tokens=step.num_committed,
            num_open=len(decoding),
            turn_s=now_s - began_s,
            now_s=now_s,
            prompt_s=prompt_s,
            waiting=[session.gate for session in decoding if session.gate is not None],
            num_nodes=step.num_nodes,
            row_s=self.pacing.step_time.row_s,
            are_free=step.are_free,
        )

    # --- faults

    def _fault(self, session: TargetSession, error: Exception) -> None:
        """End a session for what its share of the work has raised."""
        failure = self._host.faults.failure(error)
        if session.state is SessionState.ENDED:
            return
        self.close(session)
        self._host.failed(session, failure)

    def _fault_of(self, seq: Sequence, error: Exception) -> None:
        self._fault(self._by_seq[seq.seq_id], error)

    def _give_up_trees(self, sessions: list[TargetSession], error: Exception) -> dict[str, list[int]]:
        """Decode plainly this time; whose proposal is at fault is not known."""
        self._host.faults.note(error)
        for session in sessions:
            session.tree.clear()
            session.seq.tree = None
            if session.state is not SessionState.PREFILL:  # nothing is planned before the first token
                session.plan(None)
        return {}

    # --- details

    def _groups(self) -> list[list[TargetSession]]:
        """Those who may step, together as they do it."""
        return self._apart.groups(self._ready())

    def _note_pass(self, sequences: list[Sequence]) -> None:
        self._pass_keys = [self._by_seq[seq.seq_id].key for seq in sequences]
        self._host.steps.work_on(self._pass_keys)

    def _begin_masks(self, items: list[ScheduledItem]) -> None:
        self._masks.begin(
            (session, item.seq.tree or TokenTree(), item.num_tree_nodes)
            for item in items
            if item.completes and (session := self._by_seq[item.seq.seq_id]).grammar is not None
        )

    def _on_drafters(self, new: Iterable[str]) -> None:
        """Others propose from now on: what sessions gain by that is to be found out anew."""
        for name in new:
            self.pacing.expectations.forget(name)
        for session in self._host.sessions:
            session.sources = sources_of(session.body, session.wanted_drafters, self.panel.names)
            session.gate = None

    def _ready(self) -> list[TargetSession]:
        return [session for session in self._by_seq.values() if session.seq.is_ready]

    def _admit(self, session: TargetSession) -> None:
        if may_fork(session, self._host.sessions.get(session.body.fork_from)):
            self._forks.wait(session)
        else:
            self._start(session)

    def _start(self, session: TargetSession) -> None:
        body, prompt = session.body, session.prompt_logprobs
        try:
            seq = self._engine.add(
                body.token_ids,
                num_prompt_tokens=body.num_prompt_tokens,
                priority=body.priority,
                cache_salt=body.cache_salt,
                prompt_logits=prompt is not None,
                prompt_logits_from=0 if prompt is None else prompt.next_position - 1,
            )
        except EngineError as error:
            raise invalid("open.token_ids", str(error)) from error
        self._register(session, seq)

    def _register(self, session: TargetSession, seq: Sequence) -> None:
        session.begin(seq)
        self._by_seq[seq.seq_id] = session
        session.update_pause()


def _output_of(session: TargetSession) -> list[int]:
    return session.token_ids[session.body.num_prompt_tokens :]
