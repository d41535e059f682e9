"""Looks at a whole deployment while it runs, and at what is left of it when it rests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.coordinator.sessions.session import Session
from specdec.replica.bridge.frame_codec import Frame
from tests.protocol.simulation.engine_process import SimulatedEngine
from tests.protocol.simulation.faults import may_be_quarantined
from tests.protocol.simulation.jobs import Job
from tests.protocol.simulation.link_safety import LinkSafety
from tests.protocol.simulation.nodes import CoordinatorNode
from tests.protocol.simulation.ownership import Ownership
from tests.protocol.simulation.safety import EngineSafety, Violations, is_prefix
from tests.protocol.simulation.world import World

_QUARANTINED = "REQUEST_QUARANTINED"
_INNOCENT_WARNINGS = frozenset(
    {"replica_state", "stream_reset", "session_error", "request_failed", "session_stalled", "replica_ejected",
     "draft_stalled", "store_down", "drain_timed_out", "stood_still", "engine_restarts",
     "request_not_journalled", "session_failed"}
)  # fmt: skip
_INNOCENT_REASONS = frozenset({"TOO_MANY_SESSIONS", "SESSION_FAULT"})
"""What replicas may say of a session while nothing is wrong with the protocol."""


class Watch:
    """Notes each violation."""

    def __init__(self, world: World) -> None:
        self.violations = Violations()
        self._world = world
        self._window = int(world.shape.options.get("credit_window_tokens", 8))
        self._engines: dict[SimulatedEngine, EngineSafety] = {}
        self._ownership = Ownership(world, self.violations)
        self._num_checked: dict[Session, int] = {}
        self._held_at_first: dict[Session, int] = {}
        world.on_turn_of_engine = self._after_turn
        world.loop.on_turn = self._after_step
        world.store.on_change = self._check_store
        world.on_token = self._check_job

    @property
    def num_linked(self) -> int:
        """Verdicts so far whose tokens went to a draft directly."""
        return sum(engine.num_linked for engine in self._engines.values())

    # --- while it runs

    def _after_turn(self, engine: SimulatedEngine, taken: list[Frame], sent: list[Frame]) -> None:
        if engine not in self._engines:
            assert engine.core is not None
            self._engines[engine] = EngineSafety(engine.instance_id, engine.core, self.violations)
            LinkSafety(engine.instance_id, engine.core.worker.links, self.violations)
        self._engines[engine].after_turn(sent)

    def _after_step(self) -> None:
        for node in self._world.coordinators:
            if node.service is not None:
                for session in node.service._sessions:
                    self._check_session(node, session)
        self._ownership.check_coordinators()

    def _check_session(self, node: CoordinatorNode, session: Session) -> None:
        check, num_checked = self.violations.check, self._num_checked.get(session, 0)
        if session.position != num_checked:
            whole = self._whole(session)
            is_right = is_prefix(session.token_ids[num_checked:], whole, num_checked)
            check(is_right, node.name, session.session_id, "has", session.token_ids, "of", whole)
            self._num_checked[session] = session.position
        credit, written = session.target.credit_position, session.num_written
        check(credit <= written + self._window, node.name, "gave credit to", credit, "at", written)
        held = self._held_at_first.setdefault(session, session.position)  # the journal may have more than the client
        most = max(credit, held, session.num_prompt_tokens + 1)
        check(session.position <= most, node.name, session.session_id, "has", session.position, "with", credit)
        self._check_kept(node, session)

    def _check_kept(self, node: CoordinatorNode, session: Session) -> None:
        """What the coordinator lacks of an opening its target still keeps."""
        host = session.target.host
        if host is None or not session.target.is_open:
            return
        engine = next((t.engine for t in self._world.targets if host.address.startswith(f"{t.name}:")), None)
        held = None if engine is None or engine.core is None else engine.core.host.sessions.get(session.session_id)
        if held is not None and held.epoch == session.target.epoch:
            kept_from = held.sent[0].start_position if held.sent else held.num_tokens
            self.violations.check(kept_from <= session.position, node.name, "lacks", session.position, kept_from)

    def _whole(self, session: Session) -> tuple[int, ...]:
        ask = next(job.ask for job in self._world.jobs if job.request_id == session.request.key.request_id)
        return (*ask.prompt, *ask.expected(session.choice))

    def _check_store(self) -> None:
        self._ownership.check_store()
        for key, record in self._world.store.memory._state.requests.items():
            ask = next(job.ask for job in self._world.jobs if job.request_id == key.request_id)
            for choice, token_ids in enumerate(record.token_ids):
                is_right = is_prefix(token_ids, ask.expected(choice))
                self.violations.check(is_right, "the journal has", list(token_ids), "of", key)

    def _check_job(self, job: Job) -> None:
        for index, choice in job.got.choices.items():
            is_right = is_prefix(choice.token_ids, job.ask.expected(index))
            self.violations.check(is_right, job.label, "got", choice.token_ids, "of", job.ask.expected(index))

    # --- what it came to

    def check_log(self) -> None:
        """Nobody met a fault or a contradiction."""
        for process, level, event in self._world.log:
            name = event.get("event")
            is_excused = level == "warning" and name in _INNOCENT_WARNINGS
            if name in ("session_error", "session_failed"):
                is_excused = event.get("reason") in _INNOCENT_REASONS
            if name == "request_quarantined":
                is_excused = True  # `check_jobs` judges it
            self.violations.check(is_excused, process, "logged", level, event)
        for fault in self._world.loop.faults:
            self.violations.check(False, "raised where nobody caught it:", fault)

    def check_jobs(self) -> None:
        """Each request has ended with its reference, or as its client or too many dead engines wanted."""
        check = self.violations.check
        for job in self._world.jobs:
            rivals = [other for other in self._world.jobs if other.request_id == job.request_id]
            if job.error is not None:
                is_guilty = job.error.reason == _QUARANTINED and may_be_quarantined(job)
                was_taken = job.error.reason == "TAKEN_OVER" and any(r.error is None for r in rivals if r is not job)
                check(is_guilty or was_taken, job.label, "failed:", job.error.reason, job.error)
            elif not job.is_done:
                check(False, job.label, "did not end")
            elif not job.was_aborted:
                self._check_answer(job)

    def _check_answer(self, job: Job) -> None:
        for index in range(job.ask.num_choices):
            expected = job.ask.expected(index)
            choice = job.got.choices.get(index)
            got = () if choice is None else tuple(choice.token_ids)
            self.violations.check(got == expected, job.label, "ended with", got, "not", expected)
            is_same_text = choice is not None and choice.text == self._world.text_of(expected)
            self.violations.check(is_same_text, job.label, "ended with another text:", choice)

    def check_rest(self) -> None:
        """Nothing is left of requests that have ended."""
        for node in self._world.coordinators:
            if node.service is not None:
                for what, left in _left_at_coordinator(node.service):
                    self.violations.check(not left, node.name, "still has", what, left)
        for replica in self._world.replicas:
            engine = replica.engine
            if engine is not None and engine.core is not None:
                for what, left in _left_at_engine(engine.core):
                    self.violations.check(not left, replica.name, "still has", what, left)


def _left_at_coordinator(service: Any) -> Iterator[tuple[str, Any]]:
    moves = service.connections._targets.moves
    journal = service._journal
    yield "requests", service._sessions.requests
    yield "sessions", list(service._sessions)
    for link in service.fleet.links:
        yield f"sessions at {link.address}", list(link.sessions)
        yield f"sessions of an attach to {link.address}", link._listed
        yield f"entries for {link.address}", link._stream._outbox._entries
    yield "targets to give up", moves._give_ups
    for name in ("_tried", "_timers", "_waiting"):
        yield f"quarantine{name}", getattr(moves.quarantine._trials, name)
    yield "journal entries", journal._upkeep.entries
    yield "journal entries behind", journal._upkeep._behind
    yield "ends", journal._endings._running
    yield "ends that nobody heard of", list(journal._endings._unheard)
    yield "beginnings", journal._beginning
    yield "running requests", service._admission.num_running
    yield "waiting requests", service._admission.num_waiting
    yield "bytes of requests", service._prompt_bytes.num_bytes
    yield "relayed proposals", service._observer._relayed_s


def _left_at_engine(core: Any) -> Iterator[tuple[str, Any]]:
    engine, role = core.built.engine, core.role
    yield "sessions", [session.session_id for session in core.host.sessions]
    yield "sequences", len(engine.scheduler)
    yield "blocks", engine.stats().blocks_used
    yield "responses", core.host.responses.streams
    if hasattr(role, "_admission"):
        yield "suspects of a step", role.steps.isolated._halves
        yield "forks", role._admission.num_waiting
        yield "sessions of sequences", role._admission.by_seq
    else:
        yield "suspects of a step", role._work._steps._halves
        yield "heads", role._branches._owners
