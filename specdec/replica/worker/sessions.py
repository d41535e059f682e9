"""Who owns which session: attachment, epochs, leases, and sessions that outlive a broken stream.

Invariants:
    * an owner has at most one live stream; a newer stream with an equal or higher lease generation cuts the older one
      off;
    * a session belongs to the owner whose stream opened it, and its id is unique among all owners of the replica;
    * a session whose owner has no live stream is orphaned: it takes part in no step, and is freed after
      ``session_ttl_s``;
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

if TYPE_CHECKING:  # where no model runs neither does a grammar, and its libraries are not there
    from specdec.constraints.grammar.follower import GrammarFollower

DEADLINE_GRACE_S = 1.0
"""How long past its deadline a session is left to its owner."""


class StaleLease(Exception):
    """An owner attached, or opened a session, with a lower lease generation than was already seen."""


@dataclass(slots=True, eq=False)
class Owner:
    """A coordinator process."""

    owner_id: str
    lease_generation: int
    stream_id: int | None
    """Of its live stream; None: broken."""
    message_bytes: int = MIN_MESSAGE_BYTES
    """The largest message that it takes, as it said last."""


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSession:
    """One choice while it decodes, as an engine process sees it. Roles extend it."""

    session_id: str
    epoch: int
    """Grows with every opening of the session; what an owner says about an earlier one is dropped."""
    owner: Owner
    orphaned_at_s: float | None = None
    """When its owner's stream broke; None while there is one."""
    apart_until: int = 0
    """Below this many committed tokens it is stepped alone: see `specdec.replica.worker.isolation`."""
    apart_turn: int = 0
    """When that was last, counted in turns."""
    lease_generation: int = 0
    """Of the request's lease; decides between owners who both claim the session."""
    deadline_s: float | None = None
    """When its request must have ended, on the worker's clock; None: there is no deadline."""
    trace: SessionTrace | None = None
    """Set while the session is traced."""
    grammar: GrammarFollower | None = None
    """Of its constraint, at its committed tokens; None: it has none, or it is not compiled yet."""
    is_held_back: bool = False
    """Its owner has to read what waits for it before more is decided."""
    key: bytes = field(init=False)
    """What stands for it where others read what an engine works on."""

    def __post_init__(self) -> None:
        self.key = session_key(self.session_id)

    @property
    def may_step(self) -> bool:
        """Whether what is decided for it can be told to its owner: else it takes part in no step."""
        return self.orphaned_at_s is None and not self.is_held_back

    @property
    def log_fields(self) -> dict[str, str]:
        """What log lines about it carry."""
        trace = {} if self.trace is None else self.trace.log_fields
        return {"session": self.session_id, **trace}


SessionT = TypeVar("SessionT", bound=EngineSession)


def may_replace(current: EngineSession, owner: Owner, epoch: int, generation: int) -> bool:
    """Whether an owner's opening under an epoch and a lease generation takes the place of a session that is held.

    False: it is an old one of the same owner, to be dropped. The lease of a request decides between owners: a higher
    generation takes the session over.

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
        """The session, if the replica holds it."""
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
            The owner, and the stream that was cut off (None when there was none).

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
        """The stream broke: its owner's sessions become orphans, which are returned."""
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
        """Sessions that their owners should have ended when their deadlines passed."""
        limit = now_s - DEADLINE_GRACE_S
        return [s for s in self._sessions.values() if s.deadline_s is not None and s.deadline_s <= limit]

    def next_expiry_s(self) -> float | None:
        """When the next session is to be ended: an orphan, or one that is overdue; None when nothing will be."""
        sessions = self._sessions.values()
        times = [s.orphaned_at_s + self.session_ttl_s for s in sessions if s.orphaned_at_s is not None]
        times += [s.deadline_s + DEADLINE_GRACE_S for s in sessions if s.deadline_s is not None]
        return min(times, default=None)

    def _forget_if_idle(self, owner: Owner) -> None:
        if not self._by_owner.get(owner.owner_id):
            self._by_owner.pop(owner.owner_id, None)
            if owner.stream_id is None:
                self._owners.pop(owner.owner_id, None)
