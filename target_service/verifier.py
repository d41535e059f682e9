"""The target's role over the engine: sessions in, one ragged step over all of them, verdicts out."""

from __future__ import annotations

import time
from typing import Any, cast

from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from specdec.config import TargetSettings
from specdec.engine.errors import EngineError, NonFiniteLogits
from specdec.engine.outputs import StepOutput
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree
from specdec.sampling_params import VerifyMode
from specdec.v1 import common_pb2 as pb
from specdec.worker.build import BuiltEngine
from specdec.worker.errors import SessionFailure, invalid, non_finite_logits
from specdec.worker.loop import EngineWorker
from specdec.worker.sessions import Owner, Session
from target_service.decide import Candidate, Decision, Undecided, decide
from target_service.logprobs import take_prompt_logprobs
from target_service.metrics import TargetRecorder
from target_service.opening import may_fork, new_session
from target_service.policy.pacing import Pacing
from target_service.policy.payoff import Payoff, PayoffMeter
from target_service.session import TargetSession
from target_service.trace import trace_end, trace_verdict
from target_service.verdicts import end_position, make_verdict


class Verifier:
    """Decodes all sessions of a target and verifies what drafts propose for them.

    Guarantee: in coupled mode a session's tokens are a function of the model, its numerics, prompt, parameters, seed
    and choice; proposals change only how many steps they take.
    """

    def __init__(
        self,
        worker: EngineWorker,
        built: BuiltEngine,
        settings: TargetSettings,
        recorder: TargetRecorder,
    ) -> None:
        self.pacing = Pacing(settings.hold_off_ms)
        self._worker = worker
        self._engine = built.engine
        self._sampler = built.sampler
        self._identity = built.info.identity
        self._settings = settings
        self._recorder = recorder
        self._by_seq: dict[int, TargetSession] = {}
        self._payoff = PayoffMeter()
        self._due_at_s = 0.0
        self._turn_began_s = 0.0
        self._forks: dict[str, list[TargetSession]] = {}
        """Sessions that wait for the prompt of another one, by its id."""
        recorder.serves(self._identity)

    # --- sessions

    def open(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> TargetSession:
        """Check and admit a session. A fork of a prompt in prefill waits for it; its KV is then shared."""
        settings = self._settings
        if len(self._worker.sessions) >= settings.max_sessions:
            message = f"all {settings.max_sessions} sessions are taken"
            raise SessionFailure(code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS", message)
        now_s = time.monotonic()
        session = new_session(owner, session_id, epoch, body, identity=self._identity, settings=settings, now_s=now_s)
        self._recorder.opened()
        if may_fork(session, self._worker.sessions.get(body.fork_from)):
            self._forks.setdefault(body.fork_from, []).append(session)
        else:
            self._start(session)
        return session

    def position(self, session: Session) -> int:
        """Number of committed tokens."""
        return cast(TargetSession, session).num_tokens

    def entry(self, session: Session, kind: str, body: Any) -> None:
        """A proposal, or more credit."""
        session = cast(TargetSession, session)
        if kind == "proposal":
            session.arrived = body
            self._payoff.proposal_came(self._due_at_s)
        elif kind == "credit":
            session.credit_position = max(session.credit_position, body.position)
            while session.sent and end_position(session.sent[0]) <= body.acknowledged_position:
                session.sent.popleft()
            self._update_pause(session)

    def close(self, session: Session) -> None:
        """Free the sequence; its full blocks stay in the prefix cache."""
        session = cast(TargetSession, session)
        if session.trace is not None:
            trace_end(session.trace, session)
        if session.seq is not None:
            del self._by_seq[session.seq.seq_id]
            self._engine.free(session.seq)
            session.seq = None
        elif session in (waiting := self._forks.get(session.body.fork_from, [])):
            waiting.remove(session)
        if not (session.sent and session.sent[-1].finish_reason):
            self._recorder.aborted()
        for orphan in self._forks.pop(session.session_id, []):
            self._start(orphan)

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Frames carry nothing for a target besides their entries."""

    def set_orphaned(self, session: Session, orphaned: bool) -> None:
        """Orphans take part in no step."""
        self._update_pause(cast(TargetSession, session))

    def resend(self, session: Session, committed_length: int) -> None:
        """Emit the verdicts that end past `committed_length` again."""
        for verdict in cast(TargetSession, session).sent:
            if end_position(verdict) > committed_length:
                self._worker.emit(session, verdict=verdict)

    def load(self) -> pb.LoadReport:
        """Load of the engine; exports the gauges too."""
        stats = self._engine.stats()
        credit = self.pacing.draft_credit(self._settings.max_draft_tokens)
        self._recorder.load(stats, len(self._worker.sessions), credit)
        return pb.LoadReport(
            num_running=stats.running,
            num_waiting=stats.waiting + sum(map(len, self._forks.values())),
            kv_blocks_used=stats.blocks_used,
            kv_blocks_total=stats.blocks_total,
            draft_credit=credit,
            step_us=int(self.pacing.step_time.predict(max(1, stats.running)) * 1e6),
        )

    # --- steps

    def wait_s(self, now_s: float) -> float | None:
        """When the next step is due: now, after a hold-off, or not before a frame arrives."""
        self._due_at_s, self._turn_began_s = now_s, time.monotonic()
        ready = self._ready()
        for session in ready:
            if session.arrived is not None:
                self._merge(session, session.arrived)
                session.arrived = None
        return self.pacing.wait_s(ready, now_s)

    def step(self) -> None:
        """Choose what to verify, run the engine once, and turn its logits into verdicts."""
        started_s = time.monotonic()
        ready = self._ready()
        chosen = self.pacing.choose_trees(ready)
        output = self._engine.step()
        if output is None:
            return
        for seq in output.preempted:
            if (trace := self._by_seq[seq.seq_id].trace) is not None:
                trace.add(num_preemptions=1)
        candidates, undecided = self._candidates(output, chosen, started_s)
        decisions, spoiled = decide(candidates, output.logits, self._sampler)
        elapsed_s = time.monotonic() - started_s
        self._recorder.step(output, elapsed_s)
        held_s = max((self._held_s(decision.candidate.session) for decision in decisions), default=0.0)
        # A step that carries prefill says nothing of speculation: plain decoding would have carried it, too.
        is_decode = all(item.num_new_tokens <= 1 and self._by_seq[item.seq.seq_id].has_decided for item in output.items)
        for decision in decisions:
            self._commit(decision, started_s, elapsed_s)
        for each in (*undecided, *spoiled):
            self._fail_undecided(each)
        # What proposals cost besides the forward pass counts, too: merging them before, their verdicts after it.
        turn_s = time.monotonic() - self._turn_began_s
        self._recorder.turn(turn_s - elapsed_s, self._payoff_of(decisions, turn_s, held_s) if is_decode else None)
        self.pacing.observe_step(output.num_tokens, turn_s)

    def _candidates(
        self, output: StepOutput, chosen: dict[str, list[int]], started_s: float
    ) -> tuple[list[Candidate], list[Undecided]]:
        """Whose logits a step has computed, and whose prompt it could not describe."""
        candidates: list[Candidate] = []
        undecided: list[Undecided] = []
        for item in output.items:
            session = self._by_seq[item.seq.seq_id]
            if session.first_step_at_s is None:
                session.first_step_at_s = started_s
            is_bad = False
            if item.seq.prompt_logits:
                try:
                    take_prompt_logprobs(session, output.logits[item.rows], item.start, self._identity.vocab_size)
                except NonFiniteLogits as error:
                    undecided.append(Undecided(session, error))
                    is_bad = True
            if not item.completes:
                continue
            root_row = item.rows.stop - item.tree_nodes - 1
            for fork in self._forks.pop(session.session_id, []):
                self._register(fork, self._engine.fork(item.seq))
                fork.first_step_at_s = started_s
                candidates.append(Candidate(fork, root_row, TokenTree(), 0, []))
            if is_bad:
                continue
            tree = item.seq.verified_tree or TokenTree()
            candidates.append(Candidate(session, root_row, tree, item.tree_nodes, chosen.get(session.session_id, [])))
        return candidates, undecided

    def _fail_undecided(self, undecided: Undecided) -> None:
        """End a session that cannot be decided on; its KV may be NaN, so nobody else shall go on from it."""
        session = undecided.session
        if session.seq is not None:
            self._engine.distrust(session.seq)
        self._worker.fail(session, non_finite_logits(undecided.error, expected_position=session.num_tokens))

    def _commit(self, decision: Decision, started_s: float, elapsed_s: float) -> None:
        candidate, walk = decision.candidate, decision.walk
        session, seq = candidate.session, candidate.session.seq
        assert seq is not None
        self.pacing.observe_walk(session, candidate.chosen[: candidate.num_nodes], walk)
        num_stale = session.tree.num_stale
        num_wasted = session.tree.advance(walk.token_ids) + num_stale
        if session.mode is VerifyMode.REJECTION:
            num_wasted += session.tree.clear()
        verdict = make_verdict(decision, started_s, elapsed_s, self._held_s(session), num_wasted)
        session.tree.num_stale = session.tree.draft_us = 0
        decided_at_s = time.monotonic()
        self._recorder.verdict(session, verdict, num_stale, decided_at_s)
        if session.trace is not None:
            trace_verdict(session.trace, verdict)
        session.last_verdict_at_s = decided_at_s
        session.has_decided = True
        session.sent.append(verdict)
        self._worker.emit(session, verdict=verdict)
        if candidate.num_nodes:
            self._engine.accept(seq, walk.path)
        self._engine.append(seq, walk.token_ids[len(walk.path) :])
        self._engine.finalize(seq, len(seq.token_ids))
        session.history.append(walk.token_ids)
        if walk.finish_reason:
            self._worker.end(session, pb.FinishReason.Name(walk.finish_reason).removeprefix("FINISH_REASON_").lower())
            return
        seq.prompt_logits = False
        self._update_pause(session)
        self.pacing.after_verdict(session)

    # --- details

    def _payoff_of(self, decisions: list[Decision], turn_s: float, held_s: float) -> Payoff:
        return self._payoff.of_step(
            [len(decision.walk.token_ids) for decision in decisions],
            turn_s,
            held_s,
            is_plain=not any(decision.candidate.num_nodes for decision in decisions),
            drafts_may_work=any(cast(TargetSession, session).max_nodes for session in self._worker.sessions),
            began_at_s=self._due_at_s,
            step_time=self.pacing.step_time,
        )

    def _held_s(self, session: TargetSession) -> float:
        return self._due_at_s - session.held_since_s if session.held_since_s is not None else 0.0

    def _ready(self) -> list[TargetSession]:
        return [s for s in self._by_seq.values() if s.seq is not None and s.seq.is_ready]

    def _start(self, session: TargetSession) -> None:
        body = session.body
        try:
            seq = self._engine.add(
                body.token_ids,
                num_prompt_tokens=body.num_prompt_tokens,
                priority=body.priority,
                cache_salt=body.cache_salt,
                prompt_logits=body.HasField("num_prompt_logprobs"),
            )
        except EngineError as error:
            raise invalid("open.token_ids", str(error)) from error
        self._register(session, seq)

    def _register(self, session: TargetSession, seq: Sequence) -> None:
        session.seq = seq
        self._by_seq[seq.seq_id] = session
        self._update_pause(session)

    def _update_pause(self, session: TargetSession) -> None:
        if session.seq is not None:
            starved = session.has_decided and session.num_tokens >= session.credit_position
            session.seq.paused = starved or session.orphaned_at_s is not None

    def _merge(self, session: TargetSession, encoded: bytes) -> None:
        if not session.max_nodes:
            return
        depth_before = session.tree.max_depth
        try:
            proposal = pb.Proposal.FromString(encoded)
            session.tree.merge(proposal, session.token_ids)
        except DecodeError:
            self._reject(session, invalid("proposal", "does not parse"))
            return
        except SessionFailure as failure:
            self._reject(session, failure)
            return
        self.pacing.observe_proposal(session, depth_before, proposal, self._due_at_s)

    def _reject(self, session: TargetSession, failure: SessionFailure) -> None:
        """A bad proposal costs the session its draft, never its tokens."""
        self._recorder.rejected_proposal()
        rejected = pb.ProposalRejected(status=failure.to_status(), expected_position=session.num_tokens)
        self._worker.emit(session, proposal_rejected=rejected)
