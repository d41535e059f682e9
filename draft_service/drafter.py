"""The draft's role over the engine: follows commits, drafts chains for all its sessions in one batch.

Invariants:
    * the chain of a session is a function of its committed tokens; a commit that diverges from it rolls the sequence
      back to the first difference, whatever the context's length;
    * in coupled mode a drafted token is what the target would sample if its logits were the draft's: same processing of
      logits, same noise. In rejection mode it is drawn from the sparse distribution that travels with it, with noise
      of its own;
    * a proposal starts at the last committed position and carries the whole chain, so a lost or late one costs nothing.
"""

from __future__ import annotations

import time
from typing import Any, cast

from google.rpc import code_pb2

from draft_service.growth import GrowthPolicy
from draft_service.guess import Guesser
from draft_service.metrics import DraftRecorder
from draft_service.proposals import coupled_proposal, rejection_proposal
from draft_service.session import DraftedToken, DraftSession
from specdec.config import DraftSettings
from specdec.engine.errors import EngineError
from specdec.engine.token_history import TokenHistory
from specdec.sampling_params import VerifyMode
from specdec.v1 import common_pb2 as pb
from specdec.worker.build import BuiltEngine
from specdec.worker.errors import SessionFailure, invalid
from specdec.worker.loop import EngineWorker
from specdec.worker.opening import VERIFY_MODES, check_open, sampling_params
from specdec.worker.sessions import Owner, Session


class Drafter:
    """Drafts ahead of what targets commit. Nothing it does can change a coupled session's output."""

    def __init__(
        self,
        worker: EngineWorker,
        built: BuiltEngine,
        settings: DraftSettings,
        recorder: DraftRecorder,
    ) -> None:
        self._worker = worker
        self._engine = built.engine
        self._guesser = Guesser(built.sampler, settings.num_siblings, settings.num_sparse)
        self._identity = built.info.identity
        self._settings = settings
        self._recorder = recorder
        self._growth = GrowthPolicy(settings.max_ahead_tokens)
        self._by_seq: dict[int, DraftSession] = {}
        self._step_s = 0.0

    # --- sessions

    def open(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> DraftSession:
        """Check and admit a session."""
        settings, identity = self._settings, self._identity
        if len(self._worker.sessions) >= settings.max_sessions:
            message = f"all {settings.max_sessions} sessions are taken"
            raise SessionFailure(code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS", message)
        check_open(body, vocab_size=identity.vocab_size, max_model_len=identity.max_model_len)
        params = sampling_params(body, tuple(identity.eos_token_ids))
        history = TokenHistory(body.token_ids[: body.num_prompt_tokens])
        history.append(body.token_ids[body.num_prompt_tokens :])
        mode = VERIFY_MODES.get(body.verify_mode, VerifyMode(settings.verify_mode))
        is_rejection = mode is VerifyMode.REJECTION and not params.is_greedy
        limit = body.max_draft_tokens if body.HasField("max_draft_tokens") else settings.max_draft_tokens
        self._recorder.opened()
        try:
            seq = self._engine.add(
                body.token_ids,
                num_prompt_tokens=body.num_prompt_tokens,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
        except EngineError as error:
            raise invalid("open.token_ids", str(error)) from error
        session = DraftSession(
            session_id=session_id,
            epoch=epoch,
            owner=owner,
            seq=seq,
            body=body,
            params=params,
            mode=VerifyMode.REJECTION if is_rejection else VerifyMode.COUPLED,
            history=history,
            num_committed=len(body.token_ids),
            max_chain=limit if is_rejection or limit == 0 else None,
            committed_at_s=time.monotonic(),
        )
        self._by_seq[seq.seq_id] = session
        return session

    def position(self, session: Session) -> int:
        """Number of committed tokens."""
        return cast(DraftSession, session).num_committed

    def entry(self, session: Session, kind: str, body: Any) -> None:
        """A commit."""
        if kind == "commit":
            self._commit(cast(DraftSession, session), body.start_position, list(body.token_ids))

    def close(self, session: Session) -> None:
        """Free the sequence; its full blocks of committed tokens stay in the prefix cache."""
        session = cast(DraftSession, session)
        if session.seq is not None:
            del self._by_seq[session.seq.seq_id]
            self._engine.free(session.seq)
            session.seq = None

    def set_orphaned(self, session: Session, orphaned: bool) -> None:
        """Orphans take part in no step."""
        self._update_pause(cast(DraftSession, session))

    def resend(self, session: Session, committed_length: int) -> None:
        """Emit the chain again: whether the last proposal arrived is not known."""
        session = cast(DraftSession, session)
        if committed_length != session.num_committed:
            message = f"commits up to {committed_length} were lost"
            code = code_pb2.OUT_OF_RANGE
            self._worker.fail(
                session, SessionFailure(code, "COMMIT_GAP", message, expected_position=session.num_committed)
            )
            return
        session.num_sent = 0
        self._propose(session)

    def load(self) -> pb.LoadReport:
        """Load of the engine; exports the gauges too."""
        stats = self._engine.stats()
        self._recorder.load(stats, len(self._worker.sessions))
        return pb.LoadReport(
            num_running=stats.running,
            num_waiting=stats.waiting,
            kv_blocks_used=stats.blocks_used,
            kv_blocks_total=stats.blocks_total,
            step_us=int(self._step_s * 1e6),
        )

    # --- commits

    def _commit(self, session: DraftSession, start: int, token_ids: list[int]) -> None:
        """Make tokens final: keep the part of the chain that they confirm, roll back what they contradict."""
        seq, committed = session.seq, session.num_committed
        assert seq is not None
        if start > committed:
            message = f"commit.start_position: {start} leaves a gap after {committed} committed tokens"
            reason, code = "COMMIT_GAP", code_pb2.OUT_OF_RANGE
            self._recorder.mismatch()
            raise SessionFailure(code, reason, message, field="commit.start_position", expected_position=committed)
        if any(token >= self._identity.vocab_size for token in token_ids):
            raise invalid("commit.token_ids", "a token id is outside the vocabulary", expected_position=committed)
        overlap = min(committed - start, len(token_ids))
        if seq.token_ids[start : start + overlap] != token_ids[:overlap]:
            message = "commit.token_ids: contradicts tokens that were committed before"
            reason, code = "COMMIT_MISMATCH", code_pb2.FAILED_PRECONDITION
            self._recorder.mismatch()
            raise SessionFailure(code, reason, message, field="commit.token_ids", expected_position=committed)
        new = token_ids[overlap:]
        if not new:
            return
        num_confirmed = 0
        for token, drafted in zip(new, session.chain, strict=False):
            if token != drafted.token_id:
                break
            num_confirmed += 1
        keeps_chain = num_confirmed == len(new)
        num_dropped = 0 if keeps_chain else len(session.chain) - num_confirmed
        self._recorder.commit(num_confirmed, len(new), num_dropped)
        if not keeps_chain:
            if num_dropped:
                self._engine.rollback(seq, committed + num_confirmed)
            self._append(session, new[num_confirmed:])
            session.chain.clear()
            session.is_chain_over = False
        else:
            del session.chain[:num_confirmed]
        # In rejection mode the target starts every round afresh: it is sent again what it dropped.
        is_kept_there = keeps_chain and session.mode is VerifyMode.COUPLED
        session.num_sent = max(0, session.num_sent - num_confirmed) if is_kept_there else 0
        session.num_committed = committed + len(new)
        session.history.append(new)
        session.committed_at_s = time.monotonic()
        self._engine.finalize(seq, session.num_committed)
        self._update_pause(session)
        if session.mode is VerifyMode.REJECTION and session.is_chain_complete:
            self._propose(session)

    def _append(self, session: DraftSession, token_ids: list[int]) -> None:
        assert session.seq is not None
        if not token_ids:
            return
        try:
            self._engine.append(session.seq, token_ids)
        except EngineError as error:
            code = code_pb2.OUT_OF_RANGE
            raise SessionFailure(
                code, "DRAFT_CONTEXT_END", str(error), expected_position=session.num_committed
            ) from error

    # --- steps

    def wait_s(self, now_s: float) -> float | None:
        """0 while some session wants more; else nothing is due until a frame arrives."""
        return 0 if any(s.seq is not None and s.seq.is_ready for s in self._by_seq.values()) else None

    def step(self) -> None:
        """Compute one batch, draft one token for each session in it that is up to date, send the proposals."""
        started_s = time.monotonic()
        output = self._engine.step()
        if output is None:
            return
        sessions, rows = [], []
        for item in output.items:
            session = self._by_seq[item.seq.seq_id]
            if item.completes and not session.is_chain_over and session.max_chain != 0:
                sessions.append(session)
                rows.append(item.rows.stop - 1)
        if sessions:
            logits = output.logits if len(rows) == len(output.logits) else output.logits[rows]
            draft_us = int((time.monotonic() - started_s) * 1e6)
            for session, token in zip(sessions, self._guesser.guess(sessions, logits, draft_us), strict=True):
                self._extend(session, token)
        self._step_s = time.monotonic() - started_s
        self._recorder.step(output, len(sessions), self._step_s)

    def _extend(self, session: DraftSession, token: DraftedToken) -> None:
        assert session.seq is not None
        session.chain.append(token)
        if self._ends_choice(session, token.token_id):
            session.is_chain_over = True
        try:
            self._engine.append(session.seq, [token.token_id])
        except EngineError:
            session.is_chain_over = True
            session.chain.pop()
        self._update_pause(session)
        num_unsent = len(session.chain) - session.num_sent
        if session.seq.paused or (session.max_chain is None and self._growth.is_worth_sending(num_unsent)):
            self._propose(session)

    def _ends_choice(self, session: DraftSession, token_id: int) -> bool:
        params = session.params
        num_output = session.num_committed + len(session.chain) - session.body.num_prompt_tokens
        is_eos = token_id in params.eos_token_ids and not params.ignore_eos
        return is_eos or token_id in params.stop_token_ids or num_output >= params.max_tokens

    def _propose(self, session: DraftSession) -> None:
        if len(session.chain) <= session.num_sent:
            return
        chain = session.chain
        num_new = len(chain) - session.num_sent
        if session.mode is VerifyMode.REJECTION:
            proposal = rejection_proposal(session.num_committed, chain)
        else:
            proposal = coupled_proposal(session.num_committed, chain, self._settings.max_proposal_nodes)
        waited_s = time.monotonic() - session.committed_at_s if session.committed_at_s is not None else None
        self._recorder.proposal(len(proposal.token_ids), num_new, waited_s)
        session.committed_at_s = None
        session.num_sent = len(chain)
        self._worker.emit(session, proposal=proposal.SerializeToString())

    def _update_pause(self, session: DraftSession) -> None:
        if session.seq is None:
            return
        if session.max_chain is not None:
            wants_more = len(session.chain) < session.max_chain
        else:
            wants_more = self._growth.wants_more(len(session.chain), session.path_score, None)
        wants_more = wants_more and not session.is_chain_over
        # Committed tokens are computed at once, also when nothing is to be drafted after them.
        is_behind = session.seq.num_computed_tokens < session.num_committed
        session.seq.paused = session.orphaned_at_s is not None or not (wants_more or is_behind)
