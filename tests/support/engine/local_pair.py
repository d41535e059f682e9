"""A target and a draft in this process, on real models, and a loop in the coordinator's place that tests can disturb.

Workers, roles, engines and messages are the product's. Lists replace the transport.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from specdec.config import DraftSettings, TargetSettings
from specdec.config.drafter_options import DrafterOptions
from specdec.drafting.heads.footprint import footprint
from specdec.drafting.role.drafter import ModelDrafter
from specdec.drafting.role.local import LocalDraft
from specdec.drafting.role.metrics import DraftRecorder
from specdec.drafting.role.session import DraftSession
from specdec.drafting.text.drafter import TextDrafter
from specdec.drafting.translation.build import Translated, translate
from specdec.replica.bridge.frames import Frame, FrameKind
from specdec.replica.worker.build import BuiltEngine, build_engine
from specdec.replica.worker.host import SessionHost
from specdec.replica.worker.loop import EngineWorker
from specdec.replica.worker.pending_responses import ResponseLimits
from specdec.replica.worker.role import Wire
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.proposals.own_draft import own_draft_of
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.session import TargetSession
from specdec.target_service.verifier import Verifier
from specdec.telemetry import DraftMetrics, TargetMetrics
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from tests.support.engine.free_rows import FreeRows
from tests.support.engine.list_port import DRAFT_WIRE, FIRST_CALL, STREAM, TARGET_WIRE, ListPort
from tests.support.engine.outcomes import Outcome

MODELS = Path(__file__).parents[3] / "models"
UNLIMITED = 1 << 30
UNPROVED = {"self_test": False}
"""What loads the models in a third of the time; tests/unit/engine has the self-test."""

Propose = Callable[[str, list[int]], Iterable[bytes]]
"""From a session's id and tokens to the encoded proposals for the target's next turn."""


class LocalPair:
    """Runs sessions over a target and, unless `use_draft` is false, a draft."""

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        draft_options: dict[str, Any] | None = None,
        limits: ResponseLimits | None = None,
        **target_options: Any,
    ) -> None:
        self.limits = limits or ResponseLimits()
        options = {"num_threads": 1, "num_blocks": 256, "max_batch_tokens": 128, "adaptive_speculation": False}
        options |= UNPROVED
        options |= target_options
        self.target_settings = TargetSettings(model=target or str(MODELS / "target"), **options)
        options = {"num_threads": 1, "num_blocks": 256, **UNPROVED, **(draft_options or {})}
        self.draft_settings = DraftSettings(model=draft or str(MODELS / "draft"), **options)
        self.target_port, self.draft_port = ListPort(), ListPort()
        heads = footprint(self.target_settings.drafters)
        self.target_built = build_engine(self.target_settings, self.target_port, heads=heads)  # type: ignore[arg-type]
        self.draft_built = build_engine(self.draft_settings, self.draft_port)  # type: ignore[arg-type]
        self.translated = self._translate()
        if self.translated is not None:
            self.draft_built = self.translated.built
        self.now_s: float | None = None
        self._start_workers()

    def _translate(self) -> Translated | None:
        """The translation between the draft's and the target's tokenizers; None if they are the same."""
        target, settings = self.target_built, self.draft_settings
        assert target.model is not None
        return translate(
            self.draft_built,
            target.info.identity,
            target.model.tokenizer_json,
            settings.heterogeneous_vocab,
            settings.max_message_bytes,
        )

    def reset(self, *, own_draft: bool = False, drafters: Sequence[DrafterOptions] = ()) -> None:
        """Make new workers over the same engines, with their prefix caches. `own_draft`: the target has the draft's
        engine itself, and no other draft. `drafters`: the target's drafters that need no weights."""
        for worker, host in ((self.target, self.target_host), (self.draft, self.draft_host)):
            for session in list(host.sessions):
                worker.owners.end(session, "closed")
        self._start_workers(own_draft, drafters)

    def _start_workers(self, own_draft: bool = False, drafters: Sequence[DrafterOptions] | None = None) -> None:
        for port in (self.target_port, self.draft_port):
            port.inbox.clear()
            port.outbox.clear()
            port.num_pending_bytes = 0
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        draft_recorder = DraftRecorder(DraftMetrics(CollectorRegistry()))
        self.draft_host: SessionHost[DraftSession] = self._host(self.draft_port, DRAFT_WIRE, self.draft_built)
        self.drafter: Any = self._make_drafter(draft_recorder)
        info = self.draft_built.info
        self.draft = EngineWorker(self.draft_port, DRAFT_WIRE, info, self.draft_host, self.drafter)  # type: ignore[arg-type]
        self._registry = CollectorRegistry()
        recorder = TargetRecorder(TargetMetrics(self._registry))
        self.target_host: SessionHost[TargetSession] = self._host(self.target_port, TARGET_WIRE, self.target_built)
        own = None
        self.own_draft: LocalDraft | None = None
        if own_draft:  # after the drafter above, because the engine notifies only its last owner of passes
            own = own_draft_of(self.target_host, self.draft_built, self.draft_settings, draft_recorder)
            self.own_draft = own.draft
        settings = self.target_settings
        if drafters is not None:
            settings = settings.model_copy(update={"drafters": tuple(drafters)})
        self.verifier = Verifier(self.target_host, self.target_built, settings, recorder, own)
        self.target = EngineWorker(
            self.target_port,
            TARGET_WIRE,
            self.target_built.info,
            self.target_host,
            self.verifier,  # type: ignore[arg-type]
        )
        # The load of the machine must not decide the messages of a step.
        self.draft.most_taking_s = self.target.most_taking_s = math.inf
        self.opens: dict[str, pb.OpenSession] = {}
        self.epochs: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.live: set[str] = set()
        self._delayed: list[target_pb2.TargetEntry] = []
        self._under_way: list[list[target_pb2.TargetEntry]] = []
        """Proposals made in each of the last turns that have not reached the target."""
        self.answers: dict[int, Frame] = {}
        """Answers to calls, by call id."""
        self.num_calls = 0
        self._withheld: dict[str, int] = {}
        """Number of tokens that the draft of a suspended session knows, by session id."""
        attach = pb.Attach(owner_id="test")
        self.send_target(target_pb2.VerifyRequest(attach=attach))
        self.send_draft(draft_pb2.DraftRequest(attach=attach))

    @property
    def target_registry(self) -> CollectorRegistry:
        """The target's metrics, as after its next report of its load."""
        self.verifier.load()
        return self._registry

    def _make_drafter(self, recorder: DraftRecorder) -> ModelDrafter | TextDrafter:
        if self.translated is not None and self.translated.method == "text":
            return TextDrafter(self.draft_host, self.translated, self.draft_settings, recorder)  # type: ignore[arg-type]
        return ModelDrafter(self.draft_host, self.draft_built, self.draft_settings, recorder)

    def _host(self, port: ListPort, wire: Wire, built: BuiltEngine) -> SessionHost[Any]:
        return SessionHost(port, wire, built.info.identity, session_ttl_s=60.0, limits=self.limits)  # type: ignore[arg-type]

    # --- frames

    def send_target(self, message: target_pb2.VerifyRequest) -> None:
        self.target_port.inbox.append(Frame(FrameKind.MESSAGE, STREAM, message.SerializeToString()))

    def send_draft(self, message: draft_pb2.DraftRequest) -> None:
        self.draft_port.inbox.append(Frame(FrameKind.MESSAGE, STREAM, message.SerializeToString()))

    def send_entry(self, session_id: str, **body: Any) -> None:
        """Send one entry to the target, under the session's present epoch."""
        entry = target_pb2.TargetEntry(session_id=session_id, epoch=self.epochs[session_id], **body)
        self.send_target(target_pb2.VerifyRequest(entries=[entry]))

    def call(self, drafters: str, **fields: Any) -> int:
        """Ask the target for other drafters; returns the id of the call."""
        request = target_pb2.SetDraftersRequest(drafters=drafters, **fields)
        call_id = FIRST_CALL + self.num_calls
        self.num_calls += 1
        self.target_port.inbox.append(Frame(FrameKind.CALL, call_id, request.SerializeToString()))
        return call_id

    def leave(self, call_id: int) -> None:
        """Give up a call."""
        self.target_port.inbox.append(Frame(FrameKind.STREAM_CLOSED, call_id, b""))

    def answer(self, call_id: int, patience_s: float = 60.0) -> Frame:
        """Run turns of the target until it answers a call; returns the answer."""
        until_s = time.monotonic() + patience_s
        while call_id not in self.answers:
            assert time.monotonic() < until_s, "no answer"
            self.target._turn()
            self._take_results(use_draft=False)
        return self.answers[call_id]

    def tokens(self, session_id: str) -> list[int]:
        """Prompt and output so far."""
        return [*self.opens[session_id].token_ids, *self.outcomes[session_id].token_ids]

    def num_output(self, session_id: str) -> int:
        return len(self.outcomes[session_id].token_ids)

    # --- sessions

    def run(
        self,
        opens: dict[str, pb.OpenSession],
        *,
        use_draft: bool = True,
        propose: Propose | None = None,
        each_turn: Callable[[LocalPair], None] | None = None,
        rng: random.Random | None = None,
        draft_turns: int = 6,
        late_turns: int = 0,
        verify_all: bool = True,
        hold_off_ms: float | None = None,
        max_turns: int = 50_000,
        gate: SpeculationGate | None = None,
    ) -> dict[str, Outcome]:
        """Decode all sessions to their ends, then check that nothing of them is left.

        With `rng` the schedule is random: turns of target and draft interleave, and frames between them are delayed,
        repeated and lost. `propose` makes proposals in a draft's place. `each_turn` runs before every turn of the
        target. With `verify_all` rows cost nothing in the target's cost model, so that the verified tokens do not
        depend on the clock. Proposals reach the target `late_turns` of its turns after they were made: with 1, a step
        begins while the draft answers the verdict before it, as it does where both run at once. With a long
        `hold_off_ms` a step always waits for its draft. `gate` replaces a gate that never suspends drafts.
        """
        use_draft = use_draft and self.own_draft is None
        is_drafted = use_draft or propose is not None
        self.verifier.steps.pacing = Pacing(hold_off_ms if is_drafted else 0.0)
        if verify_all:
            self.verifier.steps.pacing.clock.rows = FreeRows()
        if gate is not None:
            self.verifier.steps.pacing.gate = gate
        self._withheld = {}
        self.opens = dict(opens)
        self.epochs = dict.fromkeys(opens, 1)
        self.outcomes = {session_id: Outcome() for session_id in opens}
        self.live = set(opens)
        self._delayed = []
        self._under_way = []
        self._open_all(use_draft)
        for _ in range(max_turns):
            if not self.live:
                break
            for _ in range(rng.randrange(2 * draft_turns) if rng else draft_turns):
                self.draft._turn()
            self._relay_proposals(rng, late_turns)
            if propose is not None:
                for session_id in sorted(self.live):
                    for encoded in propose(session_id, self.tokens(session_id)):
                        self.send_entry(session_id, proposal=encoded)
            if each_turn is not None:
                each_turn(self)
            self.target._turn()
            self._take_results(use_draft)
        assert not self.live, f"sessions {sorted(self.live)} did not end"
        self.draft._turn()
        self.target._turn()
        self.check_nothing_left()
        return self.outcomes

    @property
    def local_draft(self) -> LocalDraft:
        """The target's own draft, which exists after `reset(own_draft=True)`."""
        assert self.own_draft is not None
        return self.own_draft

    def reopen(self, session_id: str, *, use_draft: bool = True) -> None:
        """Open a session again under a higher epoch, with the tokens that it has committed."""
        body = pb.OpenSession()
        body.CopyFrom(self.opens[session_id])
        body.token_ids[:] = self.tokens(session_id)
        body.fork_from = ""
        self.epochs[session_id] += 1
        self._withheld.pop(session_id, None)
        self.send_entry(session_id, open=body)
        if use_draft and body.speculate:
            entry = draft_pb2.DraftEntry(session_id=session_id, epoch=self.epochs[session_id], open=body)
            self.send_draft(draft_pb2.DraftRequest(entries=[entry]))

    def check_nothing_left(self) -> None:
        """Check that no session, sequence or block is left."""
        assert len(self.target_host.sessions) == len(self.draft_host.sessions) == 0
        for engine in (self.target_built.engine, self.draft_built.engine):
            assert len(engine.scheduler) == 0
            assert engine.stats().blocks_used == 0

    def _open_all(self, use_draft: bool) -> None:
        entries = [target_pb2.TargetEntry(session_id=s, epoch=1, open=body) for s, body in self.opens.items()]
        self.send_target(target_pb2.VerifyRequest(entries=entries))
        if use_draft:
            drafts = [draft_pb2.DraftEntry(session_id=s, epoch=1, open=b) for s, b in self.opens.items() if b.speculate]
            self.send_draft(draft_pb2.DraftRequest(entries=drafts))

    def _relay_proposals(self, rng: random.Random | None, late_turns: int = 0) -> None:
        made: list[target_pb2.TargetEntry] = []
        for frame in self.draft_port.outbox:
            if frame.kind is not FrameKind.MESSAGE:
                continue
            for result in draft_pb2.DraftResponse.FromString(frame.payload).results:
                kind = result.WhichOneof("result")
                if kind == "error" and result.epoch == self.epochs[result.session_id]:
                    self.outcomes[result.session_id].draft_errors.append(result.error)
                if kind == "proposal":
                    entry = target_pb2.TargetEntry(
                        session_id=result.session_id, epoch=result.epoch, proposal=result.proposal
                    )
                    made += [entry] * (2 if rng and rng.random() < 0.1 else 1)
        self.draft_port.outbox.clear()
        self._under_way.append(made)
        if len(self._under_way) > late_turns:
            self._delayed += self._under_way.pop(0)
        now: list[target_pb2.TargetEntry] = []
        later: list[target_pb2.TargetEntry] = []
        for entry in self._delayed:
            if rng is None or rng.random() < 0.6:
                now.append(entry)
            elif rng.random() < 0.8:
                later.append(entry)
        self._delayed = later
        if now:
            self.send_target(target_pb2.VerifyRequest(entries=now))

    def _take_results(self, use_draft: bool) -> None:
        entries: list[draft_pb2.DraftEntry] = []
        for frame in self.target_port.outbox:
            if frame.stream_id >= FIRST_CALL:
                self.answers[frame.stream_id] = frame
            if frame.kind is not FrameKind.MESSAGE or frame.stream_id != STREAM:
                continue
            for result in target_pb2.VerifyResponse.FromString(frame.payload).results:
                if result.epoch == self.epochs[result.session_id]:
                    entries += self._take_result(result)
        self.target_port.outbox.clear()
        if entries and use_draft:
            self.send_draft(draft_pb2.DraftRequest(entries=entries))

    def _take_result(self, result: target_pb2.TargetResult) -> list[draft_pb2.DraftEntry]:
        session_id, outcome = result.session_id, self.outcomes[result.session_id]
        answer = draft_pb2.DraftEntry(session_id=session_id, epoch=result.epoch)
        kind = result.WhichOneof("result")
        if kind == "proposal_rejected":
            outcome.rejected.append(result.proposal_rejected)
        elif kind == "error":
            outcome.error = result.error
            self.live.discard(session_id)
            answer.close.reason = "error"
            return [answer]
        elif kind == "verdict":
            verdict = result.verdict
            assert verdict.start_position == len(self.tokens(session_id))
            assert len(verdict.origins) == len(verdict.token_ids)
            outcome.verdicts.append(verdict)
            outcome.token_ids += verdict.token_ids
            if verdict.finish_reason:
                self.live.discard(session_id)
                answer.close.reason = "finished"
                return [answer]
            if verdict.suspends_draft and session_id in self._withheld:
                return []
            start = self._withheld.pop(session_id, verdict.start_position)
            answer.commit.start_position = start
            answer.commit.token_ids.extend(self.tokens(session_id)[start:])
            answer.commit.suspend = verdict.suspends_draft
            if verdict.suspends_draft:
                self._withheld[session_id] = len(self.tokens(session_id))
            return [answer]
        return []


@cache
def prompts() -> list[list[int]]:
    """The token ids of the shipped prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    texts = [prompt["text"] for prompt in json.loads((MODELS / "prompts.json").read_text())]
    return [tokenizer.encode(text).ids for text in texts]


def chain(start_position: int, token_ids: Iterable[int]) -> bytes:
    """An encoded proposal without branches."""
    return pb.Proposal(start_position=start_position, token_ids=token_ids).SerializeToString()


def open_session(
    token_ids: list[int],
    *,
    verify_mode: pb.VerifyMode.ValueType = pb.VERIFY_MODE_COUPLED,
    body: dict[str, Any] | None = None,
    **sampling: Any,
) -> pb.OpenSession:
    """An OpenSession with neutral parameters where none are given; `body` holds fields besides sampling."""
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "max_tokens": 32,
        "seed": 7,
        "ignore_eos": False,
        **sampling,
    }
    rest = {"speculate": True, "credit_position": UNLIMITED, **(body or {})}
    return pb.OpenSession(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=pb.TokenSampling(**fields),
        verify_mode=verify_mode,
        **rest,
    )
