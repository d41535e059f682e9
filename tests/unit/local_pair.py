"""A target and a draft in this process, on real models, with the coordinator's part played by a loop that is easy to disturb.

Everything but the transport is the product: workers, roles, engines and messages. The wire is a pair of lists.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from draft_service.drafter import Drafter
from draft_service.metrics import DraftRecorder
from specdec.config import DraftSettings, TargetSettings
from specdec.rpc.frames import Frame, FrameKind
from specdec.telemetry import DraftMetrics, TargetMetrics
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from specdec.worker.build import BuiltEngine, build_engine
from specdec.worker.loop import EngineWorker, Wire
from target_service.metrics import TargetRecorder
from target_service.verifier import Verifier

MODELS = Path(__file__).parents[2] / "models"
TARGET_WIRE = Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse, target_pb2.TargetResult)
DRAFT_WIRE = Wire(draft_pb2.DraftRequest, draft_pb2.DraftResponse, draft_pb2.DraftResult)
STREAM = 1


class ListPort:
    """An engine port whose peer is the test."""

    def __init__(self) -> None:
        self.inbox: deque[Frame] = deque()
        self.outbox: list[Frame] = []

    def poll(self, timeout_s: float | None) -> list[Frame]:
        frames = list(self.inbox)
        self.inbox.clear()
        return frames

    def send(self, kind: FrameKind, stream_id: int = 0, payload: bytes = b"") -> None:
        self.outbox.append(Frame(kind, stream_id, payload))

    def pending_bytes(self, stream_id: int | None = None) -> int:
        return 0

    def flush(self, timeout_s: float) -> bool:
        return True


@dataclass
class Outcome:
    """What a session came to."""

    token_ids: list[int] = field(default_factory=list)
    verdicts: list[pb.Verdict] = field(default_factory=list)
    error: pb.SessionError | None = None

    @property
    def finish_reason(self) -> int:
        return self.verdicts[-1].finish_reason if self.verdicts else 0

    @property
    def num_accepted(self) -> int:
        return sum(verdict.num_accepted for verdict in self.verdicts)


class LocalPair:
    """Runs sessions over a target and, unless `drafts` is false, a draft."""

    def __init__(self, target: str | None = None, draft: str | None = None, **target_options: object) -> None:
        options = {"num_threads": 1, "num_blocks": 256, "max_batch_tokens": 128, **target_options}
        self.target_settings = TargetSettings(model=target or str(MODELS / "target"), **options)  # type: ignore[arg-type]
        self.draft_settings = DraftSettings(model=draft or str(MODELS / "draft"), num_threads=1, num_blocks=256)
        self.target_port, self.draft_port = ListPort(), ListPort()
        self.target_built = build_engine(self.target_settings, self.target_port)  # type: ignore[arg-type]
        self.draft_built = build_engine(self.draft_settings, self.draft_port)  # type: ignore[arg-type]
        self.reset()

    def reset(self) -> None:
        """New workers over the same engines."""
        self.target_port.inbox.clear()
        self.draft_port.inbox.clear()
        self.target_port.outbox.clear()
        self.draft_port.outbox.clear()
        self.target = self._worker(self.target_port, TARGET_WIRE, self.target_built)
        recorder = TargetRecorder(TargetMetrics(CollectorRegistry()))
        self.verifier = Verifier(self.target, self.target_built, self.target_settings, recorder)
        self.target.role = self.verifier
        self.draft = self._worker(self.draft_port, DRAFT_WIRE, self.draft_built)
        draft_recorder = DraftRecorder(DraftMetrics(CollectorRegistry()))
        self.drafter = Drafter(self.draft, self.draft_built, self.draft_settings, draft_recorder)
        self.draft.role = self.drafter
        attach = pb.Attach(owner_id="test")
        self.send_target(target_pb2.VerifyRequest(attach=attach))
        self.send_draft(draft_pb2.DraftRequest(attach=attach))

    def send_target(self, message: target_pb2.VerifyRequest) -> None:
        self.target_port.inbox.append(Frame(FrameKind.MESSAGE, STREAM, message.SerializeToString()))

    def send_draft(self, message: draft_pb2.DraftRequest) -> None:
        self.draft_port.inbox.append(Frame(FrameKind.MESSAGE, STREAM, message.SerializeToString()))

    def run(
        self,
        opens: dict[str, pb.OpenSession],
        *,
        use_draft: bool = True,
        rng: random.Random | None = None,
        draft_turns: int = 6,
        max_turns: int = 20_000,
    ) -> dict[str, Outcome]:
        """Decode all sessions to their ends.

        With `rng` the schedule is random: turns of target and draft interleave arbitrarily, and frames between them are
        delayed, repeated and lost at will.
        """
        outcomes = {session_id: Outcome() for session_id in opens}
        entries = [target_pb2.TargetEntry(session_id=s, epoch=1, open=body) for s, body in opens.items()]
        self.send_target(target_pb2.VerifyRequest(entries=entries))
        if use_draft:
            drafts = [draft_pb2.DraftEntry(session_id=s, epoch=1, open=b) for s, b in opens.items() if b.speculate]
            self.send_draft(draft_pb2.DraftRequest(entries=drafts))
        live = set(opens)
        delayed: list[target_pb2.TargetEntry] = []
        for _ in range(max_turns):
            if not live:
                return outcomes
            for _ in range(rng.randrange(2 * draft_turns) if rng else draft_turns):
                self.draft._turn()
            self._relay_proposals(delayed, rng)
            self.target._turn()
            self._take_results(outcomes, live, use_draft)
        raise AssertionError(f"sessions {sorted(live)} did not end")

    def _relay_proposals(self, delayed: list[target_pb2.TargetEntry], rng: random.Random | None) -> None:
        for frame in self.draft_port.outbox:
            if frame.kind is not FrameKind.MESSAGE:
                continue
            for result in draft_pb2.DraftResponse.FromString(frame.payload).results:
                if result.WhichOneof("result") == "proposal":
                    entry = target_pb2.TargetEntry(session_id=result.session_id, epoch=1, proposal=result.proposal)
                    delayed.append(entry)
                    if rng and rng.random() < 0.1:
                        delayed.append(entry)
        self.draft_port.outbox.clear()
        now = [entry for entry in delayed if not (rng and rng.random() < 0.4)]
        later = [entry for entry in delayed if entry not in now]
        delayed[:] = [entry for entry in later if not (rng and rng.random() < 0.2)]
        if now:
            self.send_target(target_pb2.VerifyRequest(entries=now))

    def _take_results(self, outcomes: dict[str, Outcome], live: set[str], use_draft: bool) -> None:
        commits: list[draft_pb2.DraftEntry] = []
        for frame in self.target_port.outbox:
            if frame.kind is not FrameKind.MESSAGE:
                continue
            for result in target_pb2.VerifyResponse.FromString(frame.payload).results:
                outcome = outcomes[result.session_id]
                kind = result.WhichOneof("result")
                if kind == "error":
                    outcome.error = result.error
                    live.discard(result.session_id)
                if kind != "verdict":
                    continue
                verdict = result.verdict
                outcome.verdicts.append(verdict)
                outcome.token_ids += verdict.token_ids
                if verdict.finish_reason:
                    live.discard(result.session_id)
                    close = pb.CloseSession(reason="finished")
                    commits.append(draft_pb2.DraftEntry(session_id=result.session_id, epoch=1, close=close))
                else:
                    commit = pb.Commit(start_position=verdict.start_position, token_ids=verdict.token_ids)
                    commits.append(draft_pb2.DraftEntry(session_id=result.session_id, epoch=1, commit=commit))
        self.target_port.outbox.clear()
        if commits and use_draft:
            self.send_draft(draft_pb2.DraftRequest(entries=commits))

    @staticmethod
    def _worker(port: ListPort, wire: Wire, built: BuiltEngine) -> EngineWorker:
        return EngineWorker(port, wire, built.info, session_ttl_s=60.0)  # type: ignore[arg-type]


def open_session(token_ids: list[int], **sampling: object) -> pb.OpenSession:
    """An OpenSession with neutral parameters where none are given."""
    fields = {
        "temperature": 0.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "max_tokens": 32,
        "seed": 7,
        "ignore_eos": False,
        **sampling,
    }
    return pb.OpenSession(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=pb.TokenSampling(**fields),  # type: ignore[arg-type]
        verify_mode=pb.VERIFY_MODE_COUPLED,
        speculate=True,
        credit_position=1 << 30,
    )
