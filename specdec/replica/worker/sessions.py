"""Owners of sessions: attachment, epochs, leases, and sessions that survive a broken stream.

Invariants:
    * an owner has at most one live stream; a newer stream with an equal or higher lease generation replaces it;
    * a session belongs to the owner whose stream opened it, and its id is unique among all owners of the replica;
    * a session whose owner has no live stream is orphaned: it takes part in no step, and is freed after
      ``SESSION_TTL_S``;
    * a session whose deadline has passed is overdue; its owner ends it then, so the replica waits ``DEADLINE_GRACE_S``
      before it does so itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from google.rpc import code_pb2

from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.trace import SessionTrace
from specdec.wire.error_details import session_key
from specdec.wire.message_sizes import MIN_MESSAGE_BYTES

if TYPE_CHECKING:  # without a model the grammar's libraries may not be installed
    from specdec.constraints.grammar.awaited import KnownConstraint
    from specdec.constraints.grammar.follower import GrammarFollower

SESSION_TTL_S = 60.0
"""Seconds that a session outlives its owner's stream: twice the time for which a coordinator waits for a target."""
DEADLINE_GRACE_S = 1.0
"""Seconds after its deadline for which a session is left to its owner."""


class StaleLease(Exception):
    """An owner attached, or opened a session, with a lower lease generation than before."""


@dataclass(slots=True, eq=False)
class Owner:
    """A coordinator process."""

    owner_id: str
    lease_generation: int
    stream_id: int | None
    """Id of its live stream; None: broken."""
    message_bytes: int = MIN_MESSAGE_BYTES
    """Its last reported message limit."""


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSession:
    """One choice while it decodes, as an engine process sees it. Roles extend it."""

    session_id: str
    epoch: int
    """Number of the session's opening; entries of earlier ones are dropped."""
    owner: Owner
    orphaned_at_s: float | None = None
    """Time at which its owner's stream broke; None while it is live."""
    apart_until: int = 0
    """Position up to which it is stepped alone: see `specdec.replica.worker.isolation`."""
    apart_turn: int = 0
    """Number of the turn in which it last stepped alone."""
    lease_generation: int = 0
    """Generation of the request's lease, which decides between owners that both claim the session."""
    deadline_s: float | None = None
    """Its request's deadline on the worker's clock; None without one."""
    trace: SessionTrace | None = None
    """Set while the session is traced."""
    grammar: GrammarFollower | None = None
    """State of its constraint after the committed tokens; None: no constraint, not compiled yet, or not followed by the
    engine's thread."""
    constraint: KnownConstraint | None = None
    """Its constraint, once it is compiled."""
    is_held_back: bool = False
    """Its owner must read queued responses before it steps again."""
    key: bytes = field(init=False)
    """Its key in `StepMemory`."""

    def __post_init__(self) -> None:
        self.key = session_key(self.session_id)

    @property
    def may_step(self) -> bool:
        """Whether it may take part in steps: its owner is attached and reads."""
        return self.orphaned_at_s is None and not self.is_held_back

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of each log event about the session."""
        trace = {} if self.trace is None else self.trace.log_fields
        return {"session": self.session_id, **trace}


SessionT = TypeVar("SessionT", bound=EngineSession)


def may_replace(current: EngineSession, owner: Owner, epoch: int, generation: int) -> bool:
    """Whether an opening with this epoch and lease generation replaces a held session.

    False: it is an old opening of the same owner, to be dropped. Between owners, a higher lease generation takes the
    session over.

    Raises:
        SessionFailure: the lease generation is lower than the session's, or another owner's is not higher.
    """
    is_same_owner = current.owner is owner
    if generation < current.lease_generation or (generation == current.lease_generation and not is_same_owner):
        message = f"the session is held under lease generation {current.lease_generation}"
        raise SessionFailure(code_pb2.FAILED_PRECONDITION, "STALE_LEASE", message, field="open.lease_generation")
    return not is_same_owner or epoch > current.epoch


class EngineSessionTable(Generic[SessionT]):
    """All sessions of a replica by id and by owner, and the owners by stream."""

    def __init__(self, session_ttl_s: float) -> None:
        self.session_ttl_s = session_ttl_s
        self._sessions: dict[str, SessionT] = {}
        self._by_owner: dict[str, dict[str, SessionT]] = {}
        self._owners: dict[str, Owner] = {}
        self._streams: dict[int, Owner] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SessionT]:
        return iter(self._sessions.values())

    def get(self, session_id: str) -> SessionT | None:
        """The session, or None."""
        return self._sessions.get(session_id)

    def of(self, owner: Owner) -> list[SessionT]:
        """The owner's sessions, in the order in which they were opened."""
        return list(self._by_owner.get(owner.owner_id, {}).values())

    def owner_of(self, stream_id: int) -> Owner | None:
        """The owner that attached on this stream."""
        return self._streams.get(stream_id)

    @property
    def streams(self) -> list[int]:
        """The live streams, one per attached owner."""
        return list(self._streams)

    def attach(self, stream_id: int, owner_id: str, lease_generation: int) -> tuple[Owner, int | None]:
        """Bind a stream to an owner.

        Returns:
            The owner, and the stream that was replaced (None if there was none).

        Raises:
            StaleLease: the generation is lower than one seen before.
        """
        owner = self._owners.get(owner_id)
        if owner is None:
            owner = self._owners[owner_id] = Owner(owner_id, lease_generation, None)
        if lease_generation < owner.lease_generation:
            raise StaleLease(f"generation {lease_generation} is older than {owner.lease_generation}")
        former = owner.stream_id
        if former is not None:
            self._streams.pop(former, None)
        owner.lease_generation = lease_generation
        owner.stream_id = stream_id
        self._streams[stream_id] = owner
        for session in self.of(owner):
            session.orphaned_at_s = None
        return owner, former

    def detach(self, stream_id: int, now_s: float) -> list[SessionT]:
        """A stream broke: its owner's sessions become orphans; returns them."""
        owner = self._streams.pop(stream_id, None)
        if owner is None:
            return []
        owner.stream_id = None
        for session in self.of(owner):
            session.orphaned_at_s = now_s
        self._forget_if_idle(owner)
        return self.of(owner)

    def add(self, session: SessionT) -> None:
        """Register an opened session."""
        self._sessions[session.session_id] = session
        self._by_owner.setdefault(session.owner.owner_id, {})[session.session_id] = session

    def remove(self, session: SessionT) -> None:
        """Forget a closed session."""
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]
        owned = self._by_owner.get(session.owner.owner_id, {})
        if owned.get(session.session_id) is session:
            del owned[session.session_id]
        self._forget_if_idle(session.owner)

    def expired(self, now_s: float) -> list[SessionT]:
        """Orphans whose time to live has passed."""
        limit = now_s - self.session_ttl_s
        return [s for s in self._sessions.values() if s.orphaned_at_s is not None and s.orphaned_at_s <= limit]

    def overdue(self, now_s: float) -> list[SessionT]:
        """Sessions whose owners should have ended them at their deadlines."""
        limit = now_s - DEADLINE_GRACE_S
        return [s for s in self._sessions.values() if s.deadline_s is not None and s.deadline_s <= limit]

    def next_expiry_s(self) -> float | None:
        """Time at which the next orphaned or overdue session must be ended; None without one."""
        sessions = self._sessions.values()
        times = [s.orphaned_at_s + self.session_ttl_s for s in sessions if s.orphaned_at_s is not None]
        times += [s.deadline_s + DEADLINE_GRACE_S for s in sessions if s.deadline_s is not None]
        return min(times, default=None)

    def _forget_if_idle(self, owner: Owner) -> None:
        if not self._by_owner.get(owner.owner_id):
            self._by_owner.pop(owner.owner_id, None)
            if owner.stream_id is None:
                self._owners.pop(owner.owner_id, None)
