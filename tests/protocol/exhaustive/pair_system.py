"""What can happen to a coordinator, its replicas and its client, and what must be true meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import patch

import structlog

from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.sessions.drafting import DraftSide
from specdec.coordinator.sessions.session import DraftHost, Session
from specdec.v1 import common_pb2 as pb
from tests.protocol.exhaustive import pair_state
from tests.protocol.exhaustive.bounds import Bounds
from tests.protocol.exhaustive.coordinator_life import PROMPT, CoordinatorLife, reference
from tests.protocol.exhaustive.flight import Flight
from tests.protocol.exhaustive.replica_life import ReplicaLife
from tests.protocol.simulation.channel import SimulatedReplicaChannel
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.safety import Violations, is_prefix, spy_on_results
from tests.protocol.simulation.seams import Seams
from tests.protocol.simulation.virtual_loop import VirtualLoop

_NUM_PROPOSED = 2


class _NoChance:
    """Waits are what they are on average: their spread says nothing about the order of messages."""

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2

    def getrandbits(self, num_bits: int) -> int:
        return 0


class PairSystem:
    """See `explorer.System`."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.left = Counter(
            cut=bounds.cuts,
            unlink=bounds.link_cuts,
            target=bounds.target_crashes,
            draft=bounds.draft_crashes,
            coordinator=bounds.coordinator_crashes,
            client=bounds.client_crashes,
            propose=bounds.proposals,
            early=bounds.early_timers,
            repeat=bounds.repeats,
            drop=bounds.losses,
            swap=bounds.swaps,
        )
        self.violations = Violations()
        self.client_tokens: list[list[int]] = [[] for _ in range(bounds.num_sessions)]
        self.is_answered = False
        self.network = Network(VirtualLoop(), random.Random(0), is_manual=True)
        self.loop = self.network.loop
        self._flight = Flight(self.network)
        self._stack = ExitStack()
        chance: Any = _NoChance()
        nothing: Any = None
        seams = Seams(self.loop, chance, open_channel=self._open_channel, open_store=nothing, make_engine=nothing)
        self._stack.enter_context(seams.in_place())
        self._stack.enter_context(patch.object(ReplicaLink, "on_result", spy_on_results(self.violations)))
        structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
        self._expected = [reference(choice, bounds.num_tokens) for choice in range(bounds.num_sessions)]
        assert all(len(expected) == bounds.num_tokens for expected in self._expected)
        self._num_lives = 0
        self.replicas: dict[str, ReplicaLife] = {}
        for role in ("target", "draft") if bounds.has_draft else ("target",):
            self._start_replica(role)
        self.coordinator = self._start_coordinator()
        self._settle()

    # --- explorer.System

    def events(self) -> list[str]:
        """In an order in which faultless ones come first, so that a path without faults is the first one."""
        events = [*self._at_hand(), *self._flight.arrivals()]
        left = self.left
        may_wait = bool(self.loop.timers()) and (not events or left["early"] > 0)
        if may_wait:
            events.append("time")
        if not self.is_done():
            events += ["propose"] * (left["propose"] > 0 and self._may_propose())
            events += ["cut"] * (left["cut"] > 0 and self._flight.has_stream("coordinator-1", self._cut_end))
            events += ["unlink"] * (left["unlink"] > 0 and self._flight.has_stream("draft-1", "target-1"))
            crashes = ("client", "coordinator", *self.replicas)
            events += [f"crash {who}" for who in crashes if left[who] > 0]
            events += self._flight.disorders(left)
        return events

    def apply(self, event: str) -> None:
        """Let it happen, and all that follows at once."""
        kind, _, where = event.partition(" ")
        self.left[kind] -= kind in self.left
        match kind:
            case "open":
                self.coordinator.open(int(where))
            case "turn":
                self.replicas[where].turn()
            case "read":
                self._read()
            case "time":
                self.left["early"] -= bool(self._at_hand() or self._flight.arrivals())
                self.loop.run_for(max(0.0, self.loop.timers()[0].when() - self.loop.time()))
            case "propose":
                self._propose()
            case "cut":
                self.network.cut("coordinator-1", self._cut_end)
            case "unlink":
                self.network.cut("draft-1", "target-1")
            case "crash":
                self.left[where] -= 1
                self._crash(where)
            case _:
                self._flight.apply(kind, where)
        self._settle()
        self._check()

    def are_apart(self, first: str, second: str) -> bool:
        """Faults, and time, are everywhere."""
        places = {self._place(first), self._place(second)}
        return len(places) > 1 and "" not in places

    def fingerprint(self) -> object:
        """See there."""
        return pair_state.fingerprint(self)

    def faults(self) -> list[str]:
        """See there."""
        return [*self.violations, *map(str, self.loop.faults)]

    def is_done(self) -> bool:
        """The client has its answer, and nothing of it is left."""
        is_free = not self.coordinator.link.sessions
        for life in self.replicas.values():
            is_free = is_free and not len(life.core.host.sessions) and not life.is_turn_due
        return self.is_answered and is_free

    def close(self) -> None:
        """See there."""
        for process in self.loop.processes:
            process.wind_up()
        for _ in range(10):
            tasks = [task for process in self.loop.processes for task in process.tasks]
            for task in tasks:
                task.cancel()
            if not tasks:
                break
            self.loop.run_until_idle()
        self.loop.close()
        self._stack.close()

    # --- events

    def _at_hand(self) -> list[str]:
        life = self.coordinator
        events = []
        for session in life.sessions:
            if session.target.host is None and session.finish is None and life.link.is_up:
                events.append(f"open {session.choice}")
        events += [f"turn {role}" for role, replica in self.replicas.items() if replica.is_turn_due]
        if life.request.stream._chunks:
            events.append("read")
        return events

    def _read(self) -> None:
        """The client takes a chunk."""
        chunk = self.coordinator.request.stream._chunks.popleft()
        if chunk.HasField("delta"):
            self.client_tokens[chunk.delta.index] += [token.id for token in chunk.delta.tokens]
            process, loop = self.coordinator.process, self.coordinator.loop
            session = self.coordinator.sessions[chunk.delta.index]
            process.call(loop.on_written, session, len(chunk.delta.tokens))
        self.is_answered |= chunk.HasField("finished")

    def _may_propose(self) -> bool:
        session = self.coordinator.sessions[0]
        return session.target.is_open and session.finish is None

    def _propose(self) -> None:
        """As a draft whose link is not simulated would, below what the coordinator has; the second token is wrong."""
        session = self.coordinator.sessions[0]
        start = session.position
        token_ids = list(self._expected[0][start - len(PROMPT) :][:_NUM_PROPOSED])
        if len(token_ids) == _NUM_PROPOSED:
            token_ids[-1] += 1
        proposal = pb.Proposal(start_position=start, token_ids=token_ids, draft_us=1, path_length=len(token_ids))
        side = DraftSide(host=cast(DraftHost, None), epoch=1)
        self.coordinator.process.call(self.coordinator.loop.on_proposal, session, side, proposal.SerializeToString())

    def _crash(self, who: str) -> None:
        if who == "client":
            self.coordinator.disconnect()
            self._num_lives += 1
            self.coordinator.resume(self._num_lives, self.client_tokens)
        elif who == "coordinator":
            self.coordinator.process.kill()
            self.network.died(self.coordinator.process)
            self.coordinator = self._start_coordinator()
        else:
            self.replicas[who].kill(self.network)
            self._start_replica(who)

    def _start_replica(self, role: str) -> None:
        self._num_lives += 1
        self.replicas[role] = ReplicaLife(self.network, role, self._num_lives, self.violations)

    def _start_coordinator(self) -> CoordinatorLife:
        self._num_lives += 1
        return CoordinatorLife(self.network, self._num_lives, self.bounds, self.client_tokens)

    def _settle(self) -> None:
        self.loop.run_until_idle()
        while self.bounds.is_target_eager and self._has_hurried():
            self.loop.run_until_idle()

    def _has_hurried(self) -> bool:
        """Let one thing happen at the target, or between it and the coordinator; false: nothing is left to happen."""
        calls = [call for call in self.network.calls if call.is_between("coordinator-1", "target-1")]
        pipe = next((pipe for call in calls for pipe in call.pipes if pipe.sent), None)
        if pipe is not None:
            pipe.deliver()
        elif self.replicas["target"].is_turn_due:
            self.replicas["target"].turn()
        else:
            return False
        return True

    # --- what is where

    def _open_channel(self, address: str, *_: Any) -> SimulatedReplicaChannel:
        return SimulatedReplicaChannel(self.network, address)

    @property
    def _cut_end(self) -> str:
        return "draft-1" if self.bounds.has_draft else "target-1"

    def _place(self, event: str) -> str:
        """Where an event happens; empty: everywhere."""
        kind, _, where = event.partition(" ")
        if kind in ("open", "read", "propose"):
            return "coordinator-1"
        place = ""
        if kind == "turn":
            place = self.replicas[where].name
        elif kind in ("arrive", "lose"):
            place = self._flight.sink_of(where)
        is_with_coordinator = self.bounds.is_target_eager and place == "target-1"
        return "coordinator-1" if is_with_coordinator else place

    # --- what must be true

    def _check(self) -> None:
        check, request = self.violations.check, self.coordinator.request
        check(request.stream._error is None, "the request failed:", request.stream._error)
        for session, expected, tokens in zip(
            self.coordinator.sessions, self._expected, self.client_tokens, strict=True
        ):
            check(is_prefix(session.token_ids, (*PROMPT, *expected)), "the coordinator has", session.token_ids)
            check(is_prefix(tokens, expected), "the client got", tokens)
            check(not self.is_answered or tuple(tokens) == expected, "the answer is", tokens)
            self._check_sides(session)

    def _check_sides(self, session: Session) -> None:
        check, credit = self.violations.check, session.target.credit_position
        check(credit <= session.num_written + self.bounds.credit_window, "credit to", credit)
        most = max(credit, session.num_written, session.num_prompt_tokens + 1)
        check(session.position <= most, "the coordinator is at", session.position, "with credit to", credit)
        is_contradicted = session.target.num_failures > 0 and self.bounds.must_end
        check(not is_contradicted, "the coordinator and the target contradict each other")
        held = self.replicas["target"].core.host.sessions.get(session.session_id)
        if held is not None and held.epoch == session.target.epoch:
            check(held.credit_position <= credit, "the target believes in a credit of", held.credit_position)
            kept_from = held.sent[0].start_position if held.sent else held.num_tokens
            check(kept_from <= session.position, "the target has dropped", session.position, "to", kept_from)


def _drop(_logger: Any, _method: str, _event: Any) -> Any:
    """Nobody reads the log here."""
    raise structlog.DropEvent
