"""The draft that a target runs itself: it gets the sessions' tokens, and is asked for proposals when a step is due.

A node costs a round of the draft and, if it is verified, a row of the target's step. A node is left out if its
probability is below the number of tokens that the target commits in that time. Token rate and round are those of all
sessions, so the rule holds for any number of sessions.
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
from specdec.engine.checkpoints.files import pinned
from specdec.engine.errors import EngineError, ModelLoadError
from specdec.replica.worker.build import BuiltEngine, build_engine
from specdec.replica.worker.host import SessionHost
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.means import Mean
from specdec.target_service.session import TargetSession
from specdec.v1 import common_pb2 as pb

_LENIENCE = 0.5
"""Factor on the least path score of a node. Scores are the draft's own: the target need not verify the nodes of an
overconfident draft, but it never sees those that an underconfident one leaves out."""


def build_own_draft(
    host: SessionHost[TargetSession], target: BuiltEngine, settings: DraftSettings, recorder: DraftRecorder
) -> tuple[OwnDraft, pb.ModelIdentity]:
    """Load a draft for a target's sessions; returns it with its model's identity.

    The draft shares the target's compiled constraints, and leaves the GPU memory that the target's heads will take.

    Raises:
        ModelNotSupported, ModelLoadError: the draft cannot be loaded, or shares too few tokens with the target.
    """
    try:
        settings = pinned(settings)
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
    """The own draft over a built engine, for the sessions of `host`."""

    def deliver(session_id: str, proposal: bytes) -> None:
        session = host.sessions.get(session_id)
        if session is not None:
            session.arrived = proposal

    return OwnDraft(LocalDraft(built, settings, recorder, host.steps, deliver), settings.max_draft_tokens)


@dataclass(slots=True)
class _Untold:
    """Tokens of a session that were not committed to the draft yet."""

    start: int
    """Position of the first of the tokens."""
    token_ids: list[int] = field(default_factory=list)
    is_suspended: bool = False
    """Whether the session is suspended."""
    knows_suspended: bool = False
    """Whether the last commit to the draft suspended the session."""


class OwnDraft:
    """Passes the target's sessions and tokens to a `LocalDraft`; without one it does nothing."""

    def __init__(self, draft: LocalDraft | None, most_tokens: int) -> None:
        """`most_tokens`: limit on drafted tokens per session and step."""
        self.draft = draft
        self._most_tokens = most_tokens
        self._cost_s = Mean()
        self.asked: set[str] = set()
        """Ids of sessions that the last call drafted for; a call that only computed their prompts does not count."""
        self._prompt_s = 0.0
        self._beginners: set[str] = set()
        """Ids of sessions opened at the draft that it has not proposed for yet."""
        self._untold: dict[str, _Untold] = {}
        """Tokens to commit to the draft at its next call, by id of the sessions opened there."""

    @property
    def cost_s(self) -> float:
        """Mean seconds of a call."""
        return self._cost_s.value

    @property
    def is_there(self) -> bool:
        """Whether the target has an own draft; proposals of draft services are then not used."""
        return self.draft is not None

    def decided(self, session: TargetSession, start: int, token_ids: Sequence[int], *, is_suspended: bool) -> None:
        """Note that tokens from position `start` on are committed, and that the session goes on.

        The session is opened at the draft when it is first not suspended: until then it costs the draft nothing.
        After a failure at the draft it is not opened again.
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
        """Forget a session that has ended, and close it at the draft."""
        if self.draft is not None:
            self._untold.pop(session.session_id, None)
            self._beginners.discard(session.session_id)
            self.draft.close_session(session.session_id)

    def propose(self, ready: Sequence[TargetSession], pacing: Pacing) -> float:
        """Draft for sessions whose next step is due, if that gains more than it costs.

        Returns the seconds of the call, which the sessions count as hold-off; 0.0 without a call.
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
        """Seconds of computing prompts since the last call of this method."""
        prompt_s, self._prompt_s = self._prompt_s, 0.0
        return prompt_s

    def _tell(self) -> None:
        """Commit to the draft the tokens decided since its last call; tokens of sessions suspended there wait."""
        assert self.draft is not None
        for session_id, untold in self._untold.items():
            if untold.token_ids and not (untold.is_suspended and untold.knows_suspended):
                self.draft.commit(session_id, untold.start, untold.token_ids, suspend=untold.is_suspended)
                untold.start += len(untold.token_ids)
                untold.token_ids, untold.knows_suspended = [], untold.is_suspended

    def load(self) -> None:
        """Export the draft's gauges."""
        if self.draft is not None:
            self.draft.load()

    def _appetite(self, pacing: Pacing) -> Appetite:
        assert self.draft is not None
        cost_s = self.draft.round_s + pacing.clock.rows.row_s
        return Appetite(
            num_tokens=pacing.draft_credit(self._most_tokens),
            min_path_score=_LENIENCE * min(1.0, pacing.expectations.tokens_per_s * cost_s),
        )
