"""The role of a target whose model is behind an endpoint: each step of a session is a block of calls that verify.

Greedy output is the model's greedy output. Sampled output, where it is allowed (`api.sampled`), consists of the model's
samples, each in its own context; no seed repeats them.
"""

from __future__ import annotations

import time
from typing import Any

import structlog
from google.rpc import code_pb2

from specdec.config import TargetSettings
from specdec.config.endpoint_options import ApiTargetOptions
from specdec.drafting.endpoints.calls import ApiFault, Endpoint
from specdec.replica.worker.errors import SessionFailure, invalid
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.opening import check_open, check_room, sampling_params
from specdec.replica.worker.role import DuringPass, Role
from specdec.replica.worker.sessions import Owner
from specdec.target_service.api.calls import Block
from specdec.target_service.api.session import ApiSession
from specdec.target_service.tree.walk import EndOfChoice
from specdec.telemetry import TargetMetrics
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from specdec.wire.message_sizes import microseconds

_POLL_S = 0.002
_PROGRESS_S = 1.0
_HOLD_OFF_S = 0.02
_MOST_FAILURES = 4
_RETRY = Backoff(0.25, 2.0)
_log = structlog.get_logger("specdec.target")
_PLAIN = {
    "repetition_penalty": (0.0, 1.0), "presence_penalty": (0.0,), "frequency_penalty": (0.0,), "min_tokens": (0,),
}  # fmt: skip


class ApiTarget(Role[ApiSession]):
    """Verifies by calls of one endpoint, with one block per session at a time."""

    def __init__(
        self,
        host: SessionHost[ApiSession],
        endpoint: Endpoint,
        options: ApiTargetOptions,
        settings: TargetSettings,
        identity: pb.ModelIdentity,
        metrics: TargetMetrics,
    ) -> None:
        self._host = host
        self._endpoint = endpoint
        self._options = options
        self._settings = settings
        self._identity = identity
        self._metrics = metrics
        self._blocks: dict[str, Block] = {}
        """Blocks under way, by session id."""
        self._num_calls = 0
        hold_off_ms = settings.hold_off_ms
        self._hold_off_s = _HOLD_OFF_S if hold_off_ms is None else hold_off_ms / 1000

    def open_session(self, owner: Owner, session_id: str, epoch: int, body: pb.OpenSession) -> ApiSession:
        """Check and admit a session.

        Raises SessionFailure: a field is invalid or asks for something that an endpoint cannot do, or there is no room.
        """
        identity, eos = self._identity, tuple(self._identity.eos_token_ids)
        check_room(len(self._host.sessions), self._settings.max_sessions)
        check_open(body, vocab_size=identity.vocab_size, max_model_len=identity.max_model_len, eos_token_ids=eos)
        self._check_possible(body)
        params = sampling_params(body, eos)
        wanted = body.max_draft_tokens if body.HasField("max_draft_tokens") else self._settings.max_draft_tokens
        most = min(wanted, self._settings.max_draft_tokens) if body.speculate else 0
        self._metrics.opened.inc()
        return ApiSession(
            session_id=session_id,
            epoch=epoch,
            owner=owner,
            params=params,
            end=EndOfChoice(params, body.num_prompt_tokens, identity.max_model_len),
            token_ids=list(body.token_ids),
            num_prompt_tokens=body.num_prompt_tokens,
            max_draft_tokens=most if params.is_greedy else min(most, self._options.max_calls - 1),
            credit_position=body.credit_position,
            told_at_s=time.monotonic(),
        )

    def _check_possible(self, body: pb.OpenSession) -> None:
        sampling = body.sampling
        for name, plain in _PLAIN.items():
            if getattr(sampling, name) not in plain:
                raise invalid(f"open.sampling.{name}", "the model is behind an endpoint, which decides on raw logits")
        for name in ("logit_bias", "allowed_token_ids", "bad_words"):
            if getattr(sampling, name):
                raise invalid(f"open.sampling.{name}", "the model is behind an endpoint, which decides on raw logits")
        wanted = {
            "sampling.constraint": sampling.HasField("constraint"),
            "sampling.num_logprobs": sampling.HasField("num_logprobs"),
            "num_prompt_logprobs": body.HasField("num_prompt_logprobs"),
        }
        for name, is_wanted in wanted.items():
            if is_wanted:
                raise invalid(f"open.{name}", "the model is behind an endpoint: this is not available")
        if sampling.temperature > 0 and self._options.sampled == "refused":
            message = "the model is behind an endpoint, and its target takes greedy requests only (api.sampled)"
            raise invalid("open.sampling.temperature", message)

    def position(self, session: ApiSession) -> int:
        """Number of committed tokens."""
        return session.num_tokens

    def token_ids(self, session: ApiSession) -> list[int]:
        """The committed tokens, prompt included."""
        return session.token_ids

    def entry(self, session: ApiSession, kind: str, body: Any) -> None:
        """Take a proposal, or more credit."""
        if kind == "credit":
            session.credit_position = max(session.credit_position, body.position)
        elif kind == "proposal":
            try:
                session.propose(body)
            except ValueError as error:
                status = invalid("proposal", str(error)).to_status()
                rejected = pb.ProposalRejected(status=status, expected_position=session.num_tokens)
                self._host.emit(session, proposal_rejected=rejected)

    def owner_message(self, owner: Owner, message: Any) -> None:
        """Ignored: a target's frames have only entries."""

    def close_session(self, session: ApiSession) -> None:
        """Close the session's calls."""
        self._forget(session)
        self._metrics.requests.labels("closed").inc()

    def update_pause(self, session: ApiSession) -> None:
        """Nothing to do: calls under way go on, and `_may_begin` holds back new ones."""

    def resend(self, session: ApiSession, seen: pb.AttachedSession) -> None:
        """Send again the tokens that the owner has not seen, as one verdict."""
        if seen.committed_length < session.num_tokens:
            tokens = session.token_ids[seen.committed_length :]
            origins = [pb.ORIGIN_DECODE] * len(tokens)
            self._emit(session, pb.Verdict(start_position=seen.committed_length, token_ids=tokens, origins=origins))

    def absorb_proposals(self, now_s: float) -> None:
        """Nothing to do: `entry` reads proposals as they come."""

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next call is due, at most `_POLL_S` while calls are under way; 0: one has ended or is due;
        None: nothing is due."""
        if any(self._has_ended(block, now_s) for block in self._blocks.values()):
            return 0
        waits = [_POLL_S] if self._blocks else []
        if self._num_calls < self._options.max_calls:
            for session in self._host.sessions:
                if self._may_begin(session):
                    waits.append(0.0 if session.drafted() else max(0.0, session.due_at_s - now_s))
        return min(waits, default=None)

    def step(self, during: DuringPass | None = None, /) -> None:
        """Commit the tokens of calls that ended, and begin those that are due."""
        now_s = time.monotonic()
        for session in list(self._host.sessions):
            block = self._blocks.get(session.session_id)
            if block is not None and self._has_ended(block, now_s):
                self._forget(session)
                self._host.steps.work_on([session.key])
                self._decide(session, block, now_s)
        for session in list(self._host.sessions):
            drafted = session.drafted()
            is_due = (bool(drafted) and not session.num_failures) or now_s >= session.due_at_s
            num_needed = 1 if session.params.is_greedy else len(drafted) + 1
            if is_due and self._may_begin(session) and self._num_calls + num_needed <= self._options.max_calls:
                self._num_calls += num_needed
                self._blocks[session.session_id] = Block(
                    self._endpoint, session.token_ids, drafted, session.params, self._options.fields, now_s
                )

    def load(self) -> pb.LoadReport:
        """The number of sessions and calls; also sends progress messages that are due."""
        now_s = time.monotonic()
        for session in self._host.sessions:
            if now_s - session.told_at_s >= _PROGRESS_S and not session.is_over and session.may_step:
                session.told_at_s = now_s
                is_paused = session.credit_position <= session.num_tokens
                state = pb.SessionProgress.STATE_PAUSED if is_paused else pb.SessionProgress.STATE_QUEUED
                self._host.emit(session, progress=pb.SessionProgress(state=state))
        num_sessions = len(self._host.sessions)
        self._metrics.sessions.set(num_sessions)
        return pb.LoadReport(
            num_running=len(self._blocks),
            num_sessions=num_sessions,
            max_sessions=self._settings.max_sessions,
            draft_credit=self._settings.max_draft_tokens,
            num_waiting_tokens=0,
        )

    def _may_begin(self, session: ApiSession) -> bool:
        has_credit = session.num_tokens < session.credit_position
        return has_credit and session.may_step and not session.is_over and session.session_id not in self._blocks

    def _has_ended(self, block: Block, now_s: float) -> bool:
        if not block.is_over and now_s - block.begun_at_s > 2 * self._options.timeout_s:
            block.close()  # the answer comes in too slowly
        return block.is_over

    def _forget(self, session: ApiSession) -> None:
        block = self._blocks.pop(session.session_id, None)
        if block is not None:
            self._num_calls -= len(block.calls)
            block.close()

    def _decide(self, session: ApiSession, block: Block, now_s: float) -> None:
        try:
            tokens = block.tokens(self._identity.vocab_size)
        except ApiFault as fault:
            self._retry(session, fault.kind, now_s)
            return
        start = session.num_tokens
        is_first = start == session.num_prompt_tokens
        drafted = block.drafted
        committed, num_accepted = session.commit(tokens, drafted)
        origins = [pb.ORIGIN_DRAFT] * num_accepted
        if num_accepted < len(committed):
            last = pb.ORIGIN_RECOVERED if num_accepted < len(drafted) else pb.ORIGIN_BONUS
            origins.append(last if drafted else pb.ORIGIN_PREFILL if is_first else pb.ORIGIN_DECODE)
        session.num_failures = 0
        session.due_at_s = now_s + (self._hold_off_s if session.max_draft_tokens else 0.0)
        verdict = pb.Verdict(
            start_position=start,
            token_ids=committed,
            origins=origins,
            verified_by_depth=[1] * len(drafted),
            num_accepted=num_accepted,
            hit=bool(drafted),
            step_us=microseconds(now_s - block.begun_at_s),
        )
        self._emit(session, verdict)

    def _emit(self, session: ApiSession, verdict: pb.Verdict) -> None:
        verdict.finish_reason = session.finish_reason
        if session.stop_token_id is not None:
            verdict.stop_token_id = session.stop_token_id
        session.told_at_s = time.monotonic()
        self._host.emit(session, verdict=verdict)

    def _retry(self, session: ApiSession, kind: str, now_s: float) -> None:
        session.num_failures += 1
        _log.warning("api_call_failed", kind=kind, host=self._endpoint.host, in_a_row=session.num_failures)
        if session.num_failures < _MOST_FAILURES:
            session.due_at_s = now_s + _RETRY.wait_s(session.num_failures)
            return
        self.close_session(session)
        message = f"the endpoint of the model does not answer as it should: {kind}"
        code, position = code_pb2.UNAVAILABLE, session.num_tokens
        self._host.failed(session, SessionFailure(code, "API_TARGET_FAILED", message, expected_position=position))
