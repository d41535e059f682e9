"""A real decode loop with a simulated target and simulated drafts, without a network and on a simulated clock."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from specdec.coordinator.decode_loop import DecodeLoop
from specdec.coordinator.draft_relay import DraftRelay
from specdec.coordinator.finishing import Finisher
from specdec.coordinator.journal import Journal, JournalSettings
from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.links.link_events import LinkSettings
from specdec.coordinator.links.stream_end import Ending, EndOfStream
from specdec.coordinator.observer import Observer
from specdec.coordinator.recovery import DraftRecovery
from specdec.coordinator.recovery.hedging import Hedging
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.replicas.router import PrefixRouter
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.text.choice_output import ChoiceOutput
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.store.guarded import GuardedStore
from specdec.store.interface import RequestKey
from specdec.store.memory import MemoryStore
from specdec.telemetry import CoordinatorMetrics
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2
from tests.support.scripted.model import identity, make_tokenizer

STEP_S = 0.010
NUM_AHEAD = 4
"""Number of tokens of a proposal."""
_SETTINGS = LinkSettings("coordinator-1", 1, 5.0, 0.1, 0.1)


class SimulatedDraft(DraftLink):
    """Answers each commit with a right proposal after `delay_s`."""

    def __init__(self, world: World, name: str, delay_s: float) -> None:
        channel: Any = None
        super().__init__(name, channel, _SETTINGS, events=world.recovery, proposals=world.loop)
        self.identity = identity(name)
        self.delay_s: Callable[[], float | None] = lambda: delay_s
        """Seconds before an answer; None: no answer."""
        self.is_alive = True
        self._world = world

    @property
    def is_up(self) -> bool:
        return self.is_alive

    def send(self, entry: draft_pb2.DraftEntry) -> None:
        kind = entry.WhichOneof("entry")
        delay_s = self.delay_s()
        if kind == "close" or delay_s is None:
            return
        told = entry.commit.start_position + len(entry.commit.token_ids)
        start = len(entry.open.token_ids) if kind == "open" else told
        proposal = pb.Proposal(start_position=start, token_ids=[5] * NUM_AHEAD).SerializeToString()
        result = draft_pb2.DraftResult(session_id=entry.session_id, epoch=entry.epoch, proposal=proposal)
        self._world.at(self._world.now_s + delay_s, lambda: self.is_alive and self.on_result(result))

    def die(self) -> None:
        """Break the stream for good."""
        self.is_alive = False
        self._events.on_down(self, EndOfStream(Ending.LOST))

    def tell_load(self, **load: int) -> None:
        """Report a load."""
        self.on_load(pb.LoadReport(**load))


class SimulatedTarget:
    """Commits a token at each step of the world; a relayed proposal is usable while it ends after the position."""

    role, address, identity, is_up, is_ready, tells_progress = "target", "target", None, True, True, True
    load = None

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}
        """Largest end position of a proposal, by session id."""

    def open_session(self, session: Session) -> None:
        session.target.opened(self)

    def close_session(self, session: Session, reason: str) -> None:
        self.ends.pop(session.session_id, None)

    def relay(self, session: Session, proposal: bytes) -> None:
        end = pb.Proposal.FromString(proposal).start_position + NUM_AHEAD
        self.ends[session.session_id] = max(end, self.ends.get(session.session_id, 0))

    def grant_link(self, session: Session, grant: pb.LinkGrant) -> None: ...

    def give_credit(self, session: Session) -> None: ...

    def release(self, session: Session) -> None: ...

    def hold(self, session: Session) -> None: ...


class World:
    """Sessions, drafts and a target on one clock; `run` steps all sessions every 10 ms and delivers due answers."""

    def __init__(self, set_clock: Callable[[Callable[[], float]], None], *, share: float = 0.125) -> None:
        """`set_clock` makes a function the monotonic clock of the process."""
        self.now_s = 1000.0
        set_clock(lambda: self.now_s)
        self.registry = CollectorRegistry()
        observer, self.sessions = Observer(CoordinatorMetrics(self.registry)), SessionTable()
        self.finisher = Finisher(self.sessions, observer)
        self.fleet = Fleet(PrefixRouter(), None)
        self.is_overloaded = False
        self.hedging = Hedging(
            sessions=self.sessions,
            fleet=self.fleet,
            observer=observer,
            share=share,
            is_overloaded=lambda: self.is_overloaded,
            clock=lambda: self.now_s,
        )
        self.recovery = DraftRecovery(
            sessions=self.sessions, fleet=self.fleet, observer=observer, hedging=self.hedging, reopen_s=1.0
        )
        ignore: Any = lambda *args: None  # noqa: E731
        self.loop = DecodeLoop(
            sessions=self.sessions,
            journal=Journal(
                GuardedStore(MemoryStore()),
                "coordinator-1",
                JournalSettings(),
                on_unjournalled=ignore,
                on_taken_over=ignore,
                on_aborted=ignore,
            ),
            observer=observer,
            finisher=self.finisher,
            credit_window_tokens=10**6,
            on_progress=ignore,
            on_desync=ignore,
            on_bad_draft=self.recovery.on_bad_draft,
            drafts=DraftRelay(
                observer=observer,
                path="auto",
                stall_s=2.0,
                on_bad_draft=self.recovery.on_bad_draft,
                on_draft=self.recovery.on_draft,
                on_hedged=self.recovery.on_hedged,
            ),
            on_verified=self.recovery.on_verified,
        )
        self.target = SimulatedTarget()
        self._detokenizers = DetokenizerFactory(make_tokenizer())
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._num_due = 0

    def drafts(self, *delays_s: float) -> list[SimulatedDraft]:
        """Make drafts with these delays; the first draft gets the first session."""
        links = [SimulatedDraft(self, f"draft-{number}:1", delay_s) for number, delay_s in enumerate(delays_s)]
        self.recovery.set_links(links)
        for link in links:
            link._connection = link._standing
        return links

    def open(self, draft: DraftLink, mode: pb.VerifyMode.ValueType = pb.VERIFY_MODE_COUPLED) -> Session:
        """Open a session at a draft."""
        name = f"session-{len(self.sessions)}"
        model = identity()
        session = Session(
            session_id=name,
            choice=0,
            request=Request(RequestKey("", name), name, ClientStream(), 0.0, model),
            token_ids=array("I", [3, 4, 5]),
            num_prompt_tokens=3,
            sampling=pb.TokenSampling(max_tokens=100_000, seed=1),
            verify_mode=mode,
            speculate=True,
            output=ChoiceOutput(self._detokenizers.create(True)),
            detokenizers=self._detokenizers,
        )
        session.request.start([session])
        self.loop.open_session(session, self.target, draft)
        return session

    def at(self, due_s: float, do: Callable[[], object]) -> None:
        """Schedule an action for a time."""
        self._num_due += 1
        heapq.heappush(self._due, (due_s, self._num_due, do))

    def run(self, num_steps: int, look: Callable[[], object] = lambda: None) -> None:
        """Run `num_steps` steps, and call `look` after each."""
        for _ in range(num_steps):
            ends_s = self.now_s + STEP_S
            while self._due and self._due[0][0] <= ends_s:
                self.now_s, _, do = heapq.heappop(self._due)
                do()
            self.now_s = ends_s
            for session in self.sessions:
                self._step(session)
            look()

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value."""
        value = self.registry.get_sample_value(f"specdec_coordinator_{name}", labels)
        assert value is not None
        return value

    def _step(self, session: Session) -> None:
        is_hit = self.target.ends.get(session.session_id, 0) > session.position
        verdict = pb.Verdict(start_position=session.position, token_ids=[5], origins=[pb.ORIGIN_DECODE], hit=is_hit)
        if is_hit:
            verdict.verified_by_depth.append(1)
            verdict.num_accepted = 1
        self.loop.on_verdict(session, verdict)
