"""A draft in the target's process. It computes proposals when asked, on the same cores or device.

A guess costs its computation alone, without messages, and both models may use all threads, in turns. The price: the two
models never work at the same time.

Faults: an error costs sessions this draft, and nothing else. After `_MOST_FAULTS` errors of the engine the draft stays
off until the process restarts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from specdec.config import DraftSettings
from specdec.constraints.grammar.failure import GrammarError
from specdec.drafting.role.drafter import ModelDrafter
from specdec.drafting.role.growth import GrowthPolicy
from specdec.drafting.role.metrics import DraftRecorder
from specdec.drafting.role.session import DraftSession
from specdec.replica.bridge.step_memory import StepMemory
from specdec.replica.worker.build import BuiltEngine
from specdec.replica.worker.errors import FaultLog, SessionFailure
from specdec.replica.worker.sessions import EngineSessionTable, Owner
from specdec.v1 import common_pb2 as pb

_MOST_FAULTS = 3
_NEVER_BRANCHES = 2.0
"""A score that no guess reaches: branches prepare for a pending verdict, and here there is none."""
_ROUND_WEIGHT = 0.1
"""Weight of a new observation in a round's mean time."""
_log = structlog.get_logger("specdec.replica.worker")


@dataclass(frozen=True, slots=True)
class Appetite:
    """Bounds on the next drafts."""

    num_tokens: int
    """Greatest depth below the last committed token."""
    min_path_score: float
    """Probability that all of a path is accepted, below which the path ends."""


class _Host:
    """A `DraftingHost` for sessions of one owner that is always connected."""

    def __init__(self, steps: StepMemory, deliver: Callable[[str, bytes], None]) -> None:
        self.sessions = EngineSessionTable[DraftSession](session_ttl_s=0.0)
        self.faults = FaultLog()
        self.steps = steps
        self._deliver = deliver

    def emit(self, session: DraftSession, **body: Any) -> None:
        self._deliver(session.session_id, body["proposal"])

    def failed(self, session: DraftSession, failure: SessionFailure) -> None:
        _log.warning("draft_lost", **session.log_fields, reason=failure.reason, error=str(failure))
        self.sessions.remove(session)


class LocalDraft:
    """A target's sessions at a draft in the same process. For the engine's thread only."""

    def __init__(
        self,
        built: BuiltEngine,
        settings: DraftSettings,
        recorder: DraftRecorder,
        steps: StepMemory,
        deliver: Callable[[str, bytes], None],
    ) -> None:
        """`deliver` is called with a session's id and an encoded Proposal; `steps` records whose work is in
        progress.
        """
        self._host = _Host(steps, deliver)
        self._drafter = ModelDrafter(self._host, built, settings, recorder, shares_grammars=True)
        self._engine = built.engine
        self._settings = settings
        self._owner = Owner(owner_id="", lease_generation=0, stream_id=0)
        self._num_faults = 0
        self.round_s = 0.0
        """Mean seconds of a round, which guesses one token per session."""

    @property
    def is_off(self) -> bool:
        """Whether it has failed too often."""
        return self._num_faults >= _MOST_FAULTS

    def open(self, session_id: str, epoch: int, body: pb.OpenSession) -> None:
        """Draft for a session from now on, unless the draft refuses it (its context may be too long)."""
        if self.is_off:
            return
        try:
            session = self._drafter.open(self._owner, session_id, epoch, body)
        except Exception as error:
            self._note(error)
            return
        session.apart_until = body.apart_until
        self._host.sessions.add(session)

    def commit(self, session_id: str, start: int, token_ids: Sequence[int], *, suspend: bool) -> None:
        """Commit a session's tokens from position `start`; `suspend`: draft nothing until a later commit."""
        session = self._host.sessions.get(session_id)
        if session is None:
            return
        try:
            self._drafter.entry(
                session, "commit", pb.Commit(start_position=start, token_ids=token_ids, suspend=suspend)
            )
        except Exception as error:
            self._note(error)
            self.close(session_id)

    def close(self, session_id: str) -> None:
        """Forget a session that has ended or loses its draft."""
        session = self._host.sessions.get(session_id)
        if session is None:
            return
        self._host.sessions.remove(session)
        if session.heads:
            self._drafter.close(session)

    def work(self, appetite: Appetite) -> float:
        """Draft round by round for all sessions below `appetite`, and deliver their proposals.

        Prompts are computed one chunk per call, since sessions wait for the target's next step. Returns the seconds
        spent on prompts.
        """
        settings = self._settings
        self._drafter.growth = GrowthPolicy(
            max_ahead_tokens=min(appetite.num_tokens, settings.max_ahead_tokens),
            max_nodes=settings.max_proposal_nodes,
            max_heads=1,
            min_path_score=appetite.min_path_score,
            min_branch_score=_NEVER_BRANCHES,
            min_new_steps=settings.max_ahead_tokens + 1,  # one proposal, when all is drafted
        )
        try:
            self._drafter.absorb_proposals(0.0)
            self._drafter.plan_anew()
            while self._drafter.wait_s(0.0) == 0:
                has_prompts = self._engine.num_waiting_tokens() > 0
                started_s = time.monotonic()
                self._drafter.step()
                elapsed_s, num_rounds = time.monotonic() - started_s, self._drafter.num_rounds
                if has_prompts:
                    return max(0.0, elapsed_s - num_rounds * self.round_s)
                if num_rounds:
                    self.round_s += _ROUND_WEIGHT * (elapsed_s / num_rounds - self.round_s)
        except Exception as error:
            self._num_faults += 1
            _log.error("draft_failed", num_faults=self._num_faults, exc_info=error)
            for session in list(self._host.sessions):
                self._drop(session)
        return 0.0

    def load(self) -> None:
        """Export the gauges."""
        self._drafter.load()

    def _drop(self, session: DraftSession) -> None:
        try:
            self.close(session.session_id)
        except Exception as error:
            _log.error("draft_not_freed", **session.log_fields, error=repr(error))

    def _note(self, error: Exception) -> None:
        """Note a session's error. An expected refusal is only logged; the session continues without a draft."""
        if isinstance(error, SessionFailure | GrammarError):
            _log.info("no_draft", reason=getattr(error, "reason", "CONSTRAINT"), error=str(error))
            return
        try:
            self._host.faults.note(error)
        except Exception:
            self._num_faults += 1
