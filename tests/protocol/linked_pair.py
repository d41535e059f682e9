"""A target's and a draft's engine with a direct link, in turns; the test is their coordinator and their network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from google.rpc import status_pb2

from specdec.config import DraftSettings, TargetSettings
from specdec.replica.bridge.frame_codec import Frame, FrameKind
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from tests.protocol.simulation.engine_process import EngineCore
from tests.protocol.simulation.virtual_loop import VirtualLoop

KEY = bytes(range(16))
EPOCH = 3
"""Epoch at the draft; at the target it is 1."""
PROMPT = [7, 8, 9, 10]
TARGET = "target:1"
_OWNER, _LINK, _STRANGER = 1, 2, 3
"""Streams at the target; the draft dials the link itself. The third one is a link of a draft without a grant."""
_DRAFT_TURNS = 6
"""Turns of the draft before each of the target, so that proposals are in time."""
Tamper = Callable[[pb.LinkFrame], pb.LinkFrame | None]


class LinkedPair:
    """Sessions over both engines. Commits and proposals that no link takes are relayed at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        target = TargetSettings(model="tiny", hold_off_ms=0.0, adaptive_speculation=False)
        draft = DraftSettings(model="tiny", max_ahead_tokens=4, max_heads=1, num_siblings=0)
        self.loop = loop
        self.target = EngineCore("target", target, "t", loop, 60.0)
        self.draft = EngineCore("draft", draft, "d", loop, 60.0)
        self.dialled = 0
        self.to_draft: Tamper = lambda frame: frame
        """Changes the target's frames on the link, or loses them."""
        self.to_target: Tamper = lambda frame: frame
        """Changes the draft's frames on the link, or loses them."""
        self.relays = True
        self.verdicts: list[pb.Verdict] = []
        self.states: list[pb.LinkState] = []
        self.relayed: list[bytes] = []
        """Proposals that came to the coordinator."""
        self.carried: list[pb.LinkEntry] = []
        """Entries that the link has carried, both ways."""
        self.errors: list[pb.SessionError] = []
        self.rejected: list[pb.ProposalRejected] = []
        self.aborts: list[status_pb2.Status] = []
        self.output: list[int] = []
        self.is_over = False
        for core, request in ((self.target, target_pb2.VerifyRequest), (self.draft, draft_pb2.DraftRequest)):
            self._put(core, _OWNER, request(attach=pb.Attach(owner_id="test")))  # type: ignore[operator]
        self.turn()

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*PROMPT, *self.output]

    def open(self, *, temperature: float = 1.0, max_tokens: int = 40, rejection: bool = False) -> None:
        """Open the session at both ends."""
        sampling = pb.TokenSampling(
            temperature=temperature, top_p=1.0, repetition_penalty=1.0, max_tokens=max_tokens, seed=11, ignore_eos=True
        )
        mode = pb.VERIFY_MODE_REJECTION if rejection else pb.VERIFY_MODE_COUPLED
        body = pb.OpenSession(
            token_ids=PROMPT, num_prompt_tokens=len(PROMPT), sampling=sampling, speculate=True, credit_position=1000,
            verify_mode=mode,
        )  # fmt: skip
        self.tell_target(open=body)
        self.tell_draft(open=body)

    def grant(self, target_key: bytes = KEY, draft_key: bytes = KEY, epoch: int = EPOCH) -> None:
        """Grant the link at both ends."""
        self.tell_target(link=pb.LinkGrant(key=target_key, epoch=epoch))
        self.tell_draft(link=pb.LinkGrant(key=draft_key, epoch=EPOCH, target=TARGET))

    def tell_target(self, **body: Any) -> None:
        """Send an entry as the coordinator."""
        entry = target_pb2.TargetEntry(session_id="s", epoch=1, **body)
        self._put(self.target, _OWNER, target_pb2.VerifyRequest(entries=[entry]))

    def tell_draft(self, **body: Any) -> None:
        """Send an entry as the coordinator."""
        entry = draft_pb2.DraftEntry(session_id="s", epoch=EPOCH, **body)
        self._put(self.draft, _OWNER, draft_pb2.DraftRequest(entries=[entry]))

    def send(self, core: EngineCore, *entries: pb.LinkEntry) -> None:
        """Send entries as the link's other end."""
        stream = _LINK if core is self.target else self.dialled
        self._put(core, stream, pb.LinkFrame(entries=entries))

    def send_bytes(self, core: EngineCore, payload: bytes) -> None:
        """Send anything as the link's other end."""
        core.port.inbox.append(Frame(FrameKind.MESSAGE, _LINK if core is self.target else self.dialled, payload))

    def send_as_stranger(self, *entries: pb.LinkEntry) -> None:
        """Send entries to the target on the link of a draft that was not granted the session."""
        if _STRANGER not in self.target.port.links:
            self.target.port.inbox.append(Frame(FrameKind.LINK_OPENED, _STRANGER, b"stranger"))
        self._put(self.target, _STRANGER, pb.LinkFrame(entries=entries))

    def cut(self) -> None:
        """The link ends at both ends."""
        self.target.port.inbox.append(Frame(FrameKind.STREAM_CLOSED, _LINK, b"cut"))
        self.draft.port.inbox.append(Frame(FrameKind.STREAM_CLOSED, self.dialled, b"cut"))
        self.dialled = 0

    def turn(self, times: int = 1) -> None:
        """Turns of both, draft first; what they send arrives before the next turn of the receiver."""
        for _ in range(times):
            for _ in range(_DRAFT_TURNS):
                for frame in self.draft.turn():
                    self._from_draft(frame)
            for frame in self.target.turn():
                self._from_target(frame)

    def run(self, most_turns: int = 300) -> list[int]:
        """Turn until the session has ended; returns its output."""
        for _ in range(most_turns):
            if self.is_over:
                return self.output
            self.turn()
        raise AssertionError(f"no end after {most_turns} turns")

    def _put(self, core: EngineCore, stream_id: int, message: Any) -> None:
        core.port.inbox.append(Frame(FrameKind.MESSAGE, stream_id, message.SerializeToString()))

    def _from_draft(self, frame: Frame) -> None:
        if frame.kind is FrameKind.LINK_DIAL:
            assert frame.payload.decode() == TARGET
            self.dialled = frame.stream_id
            self.target.port.inbox.append(Frame(FrameKind.LINK_OPENED, _LINK, b"draft"))
        elif frame.kind is FrameKind.STREAM_ABORT:
            self.aborts.append(status_pb2.Status.FromString(frame.payload))
        elif frame.kind is FrameKind.MESSAGE and frame.stream_id == self.dialled:
            told = self.to_target(pb.LinkFrame.FromString(frame.payload))
            if told is not None:
                self.carried += told.entries
                self._put(self.target, _LINK, told)
        elif frame.kind is FrameKind.MESSAGE and frame.stream_id == _OWNER:
            for result in draft_pb2.DraftResponse.FromString(frame.payload).results:
                match result.WhichOneof("result"):
                    case "proposal":
                        self.relayed.append(result.proposal)
                        if self.relays:
                            self.tell_target(proposal=result.proposal)
                    case "link":
                        self._on_state(result.link)
                    case "error":
                        self.errors.append(result.error)

    def _from_target(self, frame: Frame) -> None:
        if frame.kind is FrameKind.STREAM_ABORT:
            self.aborts.append(status_pb2.Status.FromString(frame.payload))
        elif frame.kind is FrameKind.MESSAGE and frame.stream_id == _LINK:
            told = self.to_draft(pb.LinkFrame.FromString(frame.payload))
            if told is not None and self.dialled:
                self.carried += told.entries
                self._put(self.draft, self.dialled, told)
        elif frame.kind is FrameKind.MESSAGE and frame.stream_id == _OWNER:
            for result in target_pb2.VerifyResponse.FromString(frame.payload).results:
                match result.WhichOneof("result"):
                    case "verdict":
                        self._on_verdict(result.verdict)
                    case "proposal_rejected":
                        self.rejected.append(result.proposal_rejected)

    def _on_verdict(self, verdict: pb.Verdict) -> None:
        assert verdict.start_position == len(self.tokens)
        self.verdicts.append(verdict)
        self.output += verdict.token_ids
        self.is_over = bool(verdict.finish_reason)
        is_direct = bool(self.states) and self.states[-1].is_direct and verdict.HasField("linked")
        if self.relays and not is_direct and not self.is_over:
            self.tell_draft(commit=pb.Commit(start_position=verdict.start_position, token_ids=verdict.token_ids))

    def _on_state(self, state: pb.LinkState) -> None:
        self.states.append(state)
        if not state.is_direct and self.relays and not self.is_over:
            unknown = self.tokens[state.position :]
            self.tell_draft(commit=pb.Commit(start_position=state.position, token_ids=unknown))


@contextmanager
def linked_pair() -> Iterator[LinkedPair]:
    """A pair whose virtual loop is closed at the end."""
    loop = VirtualLoop()
    try:
        yield LinkedPair(loop)
    finally:
        loop.close()
