"""A coordinator's process with one request, of the product's parts: sessions, decode loop, recovery, links."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry

from specdec.coordinator.decode_loop import DecodeLoop
from specdec.coordinator.draft_relay import DraftRelay
from specdec.coordinator.finishing import Finisher
from specdec.coordinator.intake.resume import HeldChoice
from specdec.coordinator.journal import Journal, JournalSettings
from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.links.link_events import LinkSettings
from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.observer import Observer
from specdec.coordinator.recovery import DraftRecovery, TargetRecovery
from specdec.coordinator.recovery.hedging import Hedging
from specdec.coordinator.recovery.replay import replay
from specdec.coordinator.replicas.compatibility import ServedModel
from specdec.coordinator.replicas.fleet import Fleet
from specdec.coordinator.replicas.router import PrefixRouter
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.sessions.table import SessionTable
from specdec.coordinator.text.choice_output import ChoiceOutput
from specdec.store.guarded import GuardedStore
from specdec.store.interface import RequestKey
from specdec.store.memory import MemoryStore
from specdec.telemetry import CoordinatorMetrics
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff
from tests.protocol.exhaustive.bounds import Bounds
from tests.protocol.simulation import model
from tests.protocol.simulation.channel import SimulatedReplicaChannel
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.nodes import address_of
from tests.protocol.simulation.virtual_loop import Process

PROMPT = (5, 6, 7)
_NAME = "coordinator-1"
_SEED = 11


@cache
def _observer() -> Observer:
    return Observer(CoordinatorMetrics(CollectorRegistry()))


def reference(choice: int, num_tokens: int) -> tuple[int, ...]:
    """What the client is to get of a choice."""
    return model.reference(PROMPT, _SEED, choice, 1.0, num_tokens)


class CoordinatorLife:
    """From its start to its end."""

    def __init__(self, network: Network, number: int, bounds: Bounds, held: Sequence[Sequence[int]]) -> None:
        """`held` are the output tokens that the client has of each choice."""
        self.process = Process(network.loop, _NAME)
        self._bounds = bounds
        self.process.call(self._build, network)
        self.resume(number, held)
        self.process.start(self.link.run(), "link")
        if self.draft_link is not None:
            self.process.start(self.draft_link.run(), "draft link")

    @property
    def sessions(self) -> Sequence[Session]:
        """One for each choice."""
        return self.request.sessions

    def resume(self, number: int, held: Sequence[Sequence[int]]) -> None:
        """The client comes, or comes again, with what it has."""
        self.request = self.process.call(self._make_request, f"session-{number}", held)

    def disconnect(self) -> None:
        """The client has gone."""
        self.process.call(self.finisher.drop, self.request, "cancelled")

    def open(self, choice: int) -> None:
        """Open a session."""
        draft = self.draft_link if self.draft_link is not None and self.draft_link.is_ready else None
        self.process.call(self.loop.open_session, self.sessions[choice], self.link, draft)

    def _build(self, network: Network) -> None:
        observer, self.table = _observer(), SessionTable()
        finisher = self.finisher = Finisher(self.table, observer)
        journal = Journal(
            GuardedStore(MemoryStore(clock=network.loop.time)),
            _NAME,
            JournalSettings(),
            on_unjournalled=lambda num: None,
            on_taken_over=finisher.take_over,
            on_aborted=finisher.abort,
        )
        self.fleet = fleet = Fleet(PrefixRouter(), None)
        fleet.served = ServedModel(model.identity("target"), model.tokenizer())
        fleet._has_served.set()
        hedging = Hedging(sessions=self.table, fleet=fleet, observer=observer, share=0.0, is_overloaded=lambda: False)
        drafts = DraftRecovery(sessions=self.table, fleet=fleet, observer=observer, hedging=hedging, reopen_s=0.1)
        self.targets = TargetRecovery(
            sessions=self.table,
            drafts=drafts,
            fleet=fleet,
            finisher=finisher,
            observer=observer,
            timeout_s=60.0,
            backoff=Backoff(0.1, 0.1),
        )
        self.loop = DecodeLoop(
            sessions=self.table,
            journal=journal,
            observer=observer,
            finisher=finisher,
            credit_window_tokens=self._bounds.credit_window,
            on_progress=self.targets.on_progress,
            on_desync=self.targets.on_desync,
            on_bad_draft=drafts.on_bad_draft,
            drafts=DraftRelay(
                observer=observer,
                path="auto",
                stall_s=60.0,
                on_bad_draft=drafts.on_bad_draft,
                on_draft=drafts.on_draft,
                on_hedged=drafts.on_hedged,
            ),
            on_verified=drafts.on_verified,
        )
        settings = LinkSettings(_NAME, 1, 5.0, 0.1, 0.1, grants_links=self._bounds.has_link)

        def channel(address: str) -> Any:
            return SimulatedReplicaChannel(network, address)

        address = address_of("target-1")
        self.link = TargetLink(address, channel(address), settings, events=self.targets, verdicts=self.loop)
        self.targets.set_links([self.link])
        self.draft_link: DraftLink | None = None
        if self._bounds.has_draft:
            address = address_of("draft-1")
            self.draft_link = DraftLink(address, channel(address), settings, events=drafts, proposals=self.loop)
            drafts.set_links([self.draft_link])

    def _make_request(self, name: str, held: Sequence[Sequence[int]]) -> Request:
        request = Request(
            key=RequestKey("", "request"),
            uid=name,
            stream=ClientStream(),
            arrived_s=0.0,
            model=model.identity("target"),
            num_context_tokens=len(PROMPT) + self._bounds.num_tokens,
        )
        sessions = [self._make_session(request, choice) for choice in range(self._bounds.num_sessions)]
        request.start(sessions)
        for session, token_ids in zip(sessions, held, strict=True):
            origins = [pb.ORIGIN_DECODE] * len(token_ids)
            choice = HeldChoice(list(token_ids), origins, num_at_client=len(token_ids))
            for _ in replay(self.finisher, session, choice, model.MAX_MODEL_LEN):
                pass
        return request

    def _make_session(self, request: Request, choice: int) -> Session:
        num_tokens, detokenizers = self._bounds.num_tokens, model.tokenizer().detokenizers
        sampling = pb.TokenSampling(
            temperature=1.0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_tokens=num_tokens,
            seed=_SEED,
            choice=choice,
            ignore_eos=True,
        )
        return Session(
            session_id=f"{request.uid}-{choice}",
            choice=choice,
            request=request,
            token_ids=array("I", PROMPT),
            num_prompt_tokens=len(PROMPT),
            num_written=len(PROMPT),
            sampling=sampling,
            verify_mode=pb.VERIFY_MODE_COUPLED,
            speculate=self._bounds.has_draft or self._bounds.proposals > 0,
            output=ChoiceOutput(detokenizers.create(True)),
            detokenizers=detokenizers,
        )
