"""The draft that a target runs itself: told of its sessions, and asked for proposals when a step is due.

How much is drafted: a guess costs a round of the draft and, if it is verified, a row of the target's step. A guess is
left out if its probability is below the number of tokens that the target commits in that time. Rate and round are of
all sessions, so the rule holds for any number of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec.config import DraftSettings
from specdec.config.drafter_options import DRAFT_MODEL
from specdec.drafting.role.local import Appetite, LocalDraft
from specdec.drafting.role.metrics import DraftRecorder
from specdec.drafting.translation.build import translate
from specdec.engine.errors import EngineError, ModelLoadError
from specdec.replica.worker.build import BuiltEngine, build_engine
from specdec.replica.worker.host import SessionHost
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.means import Mean
from specdec.target_service.session import TargetSession
from specdec.v1 import common_pb2 as pb

_LENIENCE = 0.5
"""Factor on the least score of a guess. Scores are the draft's own: a guess of a too sure draft is not verified, but
one that an unsure draft leaves out is never seen."""


def build_own_draft(
    host: SessionHost[TargetSession], target: BuiltEngine, settings: DraftSettings, recorder: DraftRecorder
) -> tuple[OwnDraft, pb.ModelIdentity]:
    """Load a draft for a target's sessions, and tell what it is. What the target has compiled of constraints it finds
    compiled, and what the target's heads will take of a GPU's memory it leaves to them.

    Raises:
        ModelNotSupported, ModelLoadError: with a reason for people; it cannot be loaded, or shares too few tokens with
            the target.
    """
    try:
        built = build_engine(settings, others_bytes=target.awaited_bytes)
    except EngineError as error:
        raise type(error)(f"own_draft: {error}") from error
    if built.info.identity.tokenizer_digest != target.info.identity.tokenizer_digest:
        built = _translated(built, target, settings)
    own = own_draft_of(host, replace(built, grammars=target.grammars), settings, recorder)
    return own, built.info.identity


def _translated(built: BuiltEngine, target: BuiltEngine, settings: DraftSettings) -> BuiltEngine:
    if target.model is None:
        raise ModelLoadError(f"own_draft: {settings.model} has another tokenizer than the target")
    if settings.heterogeneous_vocab == "text":
        raise ModelLoadError("own_draft: heterogeneous_vocab: text is for a draft service")
    identity, tokenizer_json = target.info.identity, target.model.tokenizer_json
    try:
        translated = translate(built, identity, tokenizer_json, "intersection", settings.max_message_bytes)
    except EngineError as error:
        raise type(error)(f"own_draft: {error}") from error
    return built if translated is None else translated.built


def own_draft_of(
    host: SessionHost[TargetSession], built: BuiltEngine, settings: DraftSettings, recorder: DraftRecorder
) -> OwnDraft:
    """The draft of `host`'s sessions that an engine makes."""

    def deliver(session_id: str, proposal: bytes) -> None:
        session = host.sessions.get(session_id)
        if session is not None:
            session.arrived = proposal

    return OwnDraft(LocalDraft(built, settings, recorder, host.steps, deliver), settings.max_draft_tokens)


@dataclass(slots=True)
class _Untold:
    """Tokens of a session that the draft does not know yet."""

    start: int
    """Position of the first of the tokens."""
    token_ids: list[int] = field(default_factory=list)
    is_suspended: bool = False
    """Whether no proposals are wanted for it now."""
    knows_suspended: bool = False
    """Whether the draft knows that."""


class OwnDraft:
    """Keeps a `LocalDraft` in step with the sessions of the target; without one it does nothing."""

    def __init__(self, draft: LocalDraft | None, most_tokens: int) -> None:
        """`most_tokens` per session and step are drafted."""
        self.draft = draft
        self._most_tokens = most_tokens
        self._cost_s = Mean()
        self.asked: set[str] = set()
        """Sessions that the last call was for, and did not only compute a prompt."""
        self._prompt_s = 0.0
        self._beginners: set[str] = set()
        """Sessions that were opened at the draft and that it has not proposed for yet."""
        self._untold: dict[str, _Untold] = {}
        """Tokens, by id of sessions opened at the draft, that it learns of when it is asked next."""

    @property
    def cost_s(self) -> float:
        """Mean seconds of a call."""
        return self._cost_s.value

    @property
    def is_there(self) -> bool:
        """Sessions have their drafts here, and proposals from elsewhere are not used."""
        return self.draft is not None

    def decided(self, session: TargetSession, start: int, token_ids: Sequence[int], *, is_suspended: bool) -> None:
        """Tokens from position `start` are final, and the session goes on.

        It is opened at the draft when proposals are first of use: one that is suspended from the start costs nothing.
        A draft that a session has lost it does not get again.
        """
        if self.draft is None or session.max_nodes == 0 or not session.may_use(DRAFT_MODEL):
            return
        untold = self._untold.get(session.session_id)
        if untold is not None:
            untold.token_ids += token_ids
            untold.is_suspended = is_suspended
        elif not is_suspended:
            self._untold[session.session_id] = _Untold(start + len(token_ids))
            body = pb.OpenSession()
            body.CopyFrom(session.body)
            body.token_ids[:] = session.token_ids
            self.draft.open_session(session.session_id, session.epoch, body)
            self._beginners.add(session.session_id)

    def closed(self, session: TargetSession) -> None:
        """A session has ended."""
        if self.draft is not None:
            self._untold.pop(session.session_id, None)
            self._beginners.discard(session.session_id)
            self.draft.close_session(session.session_id)

    def propose(self, ready: Sequence[TargetSession], pacing: Pacing) -> float:
        """Draft for sessions whose next step is due, if that gains more than it costs; the time it takes is noted as
        one that they wait for a draft.

        Returns the seconds that it took; 0 where nothing was drafted.
        """
        self.asked.clear()
        own = [session for session in ready if session.max_nodes > 0 and session.may_use(DRAFT_MODEL)]
        wanted = [session for session in own if pacing.may_verify(session)]
        if self.draft is None or not wanted:
            return 0.0
        expectations = pacing.expectations
        asks = [(session, expectations.headroom(session)) for session in wanted]
        if not expectations.is_worth_asking(DRAFT_MODEL, asks, self.cost_s):
            return 0.0
        began_s = time.monotonic()
        self._tell()
        prompt_s = self.draft.work(self._appetite(pacing))
        drafted_s = time.monotonic() - began_s
        beginners = [session for session in wanted if session.session_id in self._beginners]
        self._beginners.difference_update(session.session_id for session in beginners if session.arrived is not None)
        if prompt_s:
            self._note_prompts(beginners, prompt_s, pacing)
        else:
            self._cost_s.observe(drafted_s)
        self.asked.update(session.session_id for session in wanted if not prompt_s or session.arrived is not None)
        for session in own:
            session.drafted_s += drafted_s
        return drafted_s

    def _note_prompts(self, beginners: Sequence[TargetSession], prompt_s: float, pacing: Pacing) -> None:
        self._prompt_s += prompt_s
        for session in beginners:
            if session.gate is not None:
                pacing.gate.invested(session.gate, prompt_s / len(beginners))

    def take_prompt_s(self) -> float:
        """How long prompts were computed since this was last asked."""
        prompt_s, self._prompt_s = self._prompt_s, 0.0
        return prompt_s

    def _tell(self) -> None:
        """Give the draft the tokens decided since it was last asked; those of suspended sessions can wait."""
        assert self.draft is not None
        for session_id, untold in self._untold.items():
            if untold.token_ids and not (untold.is_suspended and untold.knows_suspended):
                self.draft.commit(session_id, untold.start, untold.token_ids, suspend=untold.is_suspended)
                untold.start += len(untold.token_ids)
                untold.token_ids, untold.knows_suspended = [], untold.is_suspended

    def load(self) -> None:
        """Export the gauges."""
        if self.draft is not None:
            self.draft.load()

    def _appetite(self, pacing: Pacing) -> Appetite:
        assert self.draft is not None
        cost_s = self.draft.round_s + pacing.clock.rows.row_s
        return Appetite(
            num_tokens=pacing.draft_credit(self._most_tokens),
            min_path_score=_LENIENCE * min(1.0, pacing.expectations.tokens_per_s * cost_s),
        )
