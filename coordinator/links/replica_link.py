"""One replica: its state, and the sessions that it should hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self

import structlog

from specdec.config.drafter_options import DRAFTER_NAMES
from specdec.coordinator.links.link_events import LinkEvents, LinkSettings, LinkState
from specdec.coordinator.links.replica_stream import ReplicaStream
from specdec.coordinator.links.stream_end import describe, end_of
from specdec.coordinator.links.wire import EntryT, LinkWire, RequestT, ResultT
from specdec.coordinator.sessions.session import Session
from specdec.v1 import common_pb2 as pb
from specdec.wire.channel import ReplicaChannel
from specdec.wire.errors import IncompatibleReplica
from specdec.wire.message_sizes import ENTRY_OVERHEAD_BYTES, frame_bytes, most_bytes

_EXPECTED_STATES = (LinkState.CONNECTING, LinkState.READY, LinkState.DRAINING)
_log = structlog.get_logger(__name__)


class ReplicaLink(Generic[RequestT, EntryT, ResultT]):
    """A link to a target or draft. Run `run` as a task for as long as the link is wanted.

    Invariant: `sessions` holds exactly the sessions that this replica should hold, with their current epochs.
    """

    def __init__(
        self,
        *,
        role: str,
        address: str,
        channel: ReplicaChannel,
        settings: LinkSettings,
        wire: LinkWire[RequestT, EntryT],
        events: LinkEvents[Self],
        epoch_of: Callable[[Session], int],
        handle: Callable[[Session, ResultT], None],
        takes_up: bool,
    ) -> None:
        """Connect to nothing yet.

        Args:
            role: `target` or `draft`.
            address: host:port.
            channel: to the replica; the link does not close it.
            settings: shared by all links.
            wire: the role's messages.
            events: receives the link's events.
            epoch_of: the current epoch of a session on this side.
            handle: takes a session's results from the replica.
            takes_up: whether a replica keeps its sessions when its stream is opened again.
        """
        self.role = role
        self.address = address
        self.channel = channel
        self.detail = ""
        """Why it is down or incompatible, for people."""
        self.is_retired = False
        """Discovery no longer lists it."""
        self.identity: pb.ModelIdentity | None = None
        self.instance_id = ""
        """Id of the replica's process, as last reported; empty if it reports none."""
        self.load: pb.LoadReport | None = None
        """The last report on the present stream."""
        self.num_own_at_load = 0
        """Our sessions there when the last report came."""
        self.drafters: frozenset[str] = frozenset()
        """Names of the drafters that it runs itself."""
        self.own_draft: pb.ModelIdentity | None = None
        """The draft model that it reports to run in its own process; unchecked."""
        self.steps_apart = False
        """It can step a session alone, and reports its engine's sessions when the engine ends."""
        self.refused_s: float | None = None
        """Monotonic time at which it last reported to be full; None: not since its last load report."""
        self.sessions: dict[str, Session] = {}
        """By session id."""
        self.num_streams = 0
        """Streams opened so far."""
        self._told_message_bytes = 0
        self._connection = LinkState.CONNECTING
        self._standing = LinkState.READY
        self._shown: tuple[LinkState, str] | None = None
        self._settings = settings
        self._wire = wire
        self._events = events
        self._epoch_of = epoch_of
        self._handle = handle
        self._takes_up = takes_up
        self._listed: list[tuple[Session, int]] = []
        """Sessions in the last attach, each with its epoch then."""
        self._stream: ReplicaStream[RequestT, EntryT, ResultT] = ReplicaStream(
            wire, channel, settings, self, role=role, address=address
        )

    @property
    def state(self) -> LinkState:
        """The connection's state; of a stream that is up, draining if the replica drains, else its standing."""
        if not self.is_up:
            return self._connection
        return LinkState.DRAINING if self.is_draining else self._standing

    @property
    def is_up(self) -> bool:
        """Entries can be sent."""
        return self._connection is LinkState.READY

    @property
    def is_ready(self) -> bool:
        """New sessions may be opened without restriction."""
        return self.state is LinkState.READY

    @property
    def tells_limit(self) -> bool:
        """It reports its message limit and respects ours; older replicas do neither."""
        return self._told_message_bytes > 0

    @property
    def message_bytes(self) -> int:
        """Its message limit, in bytes."""
        return most_bytes(self._told_message_bytes, self._settings.max_message_bytes)

    @property
    def is_draining(self) -> bool:
        """The replica shuts down, or is no longer listed: its sessions may end there, and it gets no new ones."""
        return self.is_retired or (self.load is not None and self.load.draining)

    def set_retired(self, is_retired: bool) -> None:
        """Note whether discovery still lists the replica."""
        self.is_retired = is_retired
        self._show_state()

    def set_standing(self, standing: LinkState) -> None:
        """Set READY, EJECTED or PROBATION: its state while its stream is up."""
        self._standing = standing
        self._show_state()

    async def run(self) -> None:
        """Keep a stream open until `end` or cancellation."""
        await self._stream.run()

    def end(self) -> None:
        """End the stream after the queued entries; then `run` returns."""
        self._stream.end()

    def reset(self, reason: str) -> None:
        """Break the stream; it will be opened again."""
        self._stream.reset(reason)

    def send(self, entry: EntryT) -> None:
        """Send an entry with the next frame. It is dropped while the stream is down: attaching replaces it."""
        if self.is_up:
            self._stream.send(entry)

    # Called by the stream: see `StreamOwner`.

    @property
    def is_needed(self) -> bool:
        """Sessions wait for this replica."""
        return bool(self.sessions)

    def on_info(self: Self, info: pb.GetReplicaInfoResponse) -> None:
        """Raises IncompatibleReplica if another link leads to this process."""
        self._told_message_bytes = info.max_message_bytes
        self.steps_apart = info.HasField("last_end")
        self.drafters = frozenset(info.drafters) & DRAFTER_NAMES
        self.own_draft = info.own_draft if info.HasField("own_draft") else None
        self._events.check_instance(self, info.instance_id)

    def on_too_large(self: Self, session_id: str, epoch: int, cause: str) -> None:
        """Report an entry that is too large, if its session's epoch is still current."""
        session = self.sessions.get(session_id)
        if session is not None and session.finish is None and self._epoch_of(session) == epoch:
            self._events.on_too_large(self, session, cause)

    def attach(self) -> pb.Attach:
        """The first frame: the sessions that the replica may still hold, if it keeps any, as many as a message holds.

        The answer, which names a part of these, must fit into our message limit. Unlisted sessions count as lost.
        """
        settings = self._settings
        attach = pb.Attach(
            owner_id=settings.owner_id,
            lease_generation=settings.lease_generation,
            max_message_bytes=settings.max_message_bytes,
        )
        room_bytes = frame_bytes(min(self.message_bytes, settings.max_message_bytes)) // 2
        self._listed = []
        for session in self.sessions.values() if self._takes_up else ():
            epoch, prompt = self._epoch_of(session), session.target.prompt
            told = pb.AttachedSession(session_id=session.session_id, epoch=epoch, committed_length=session.position)
            if prompt is not None:
                told.prompt_logprobs_position = prompt.arrived
            room_bytes -= told.ByteSize() + ENTRY_OVERHEAD_BYTES
            if room_bytes < 0:
                break
            attach.sessions.append(told)
            self._listed.append((session, epoch))
        return attach

    async def on_attached(self: Self, attached: pb.Attached, load: pb.LoadReport | None) -> None:
        """Become ready. Raises IncompatibleReplica if the replica cannot be used."""
        if load is not None:
            self._note_load(load)  # a draining replica is never shown as ready
        identity = pb.ModelIdentity()
        identity.CopyFrom(attached.identity)
        self.identity = identity
        self._events.check_instance(self, attached.instance_id)  # two links may have asked at once
        self.instance_id = attached.instance_id
        await self._events.check_identity(self, identity)
        self.num_streams += 1
        self._set_connection(LinkState.READY, "")
        unknown = set(attached.unknown_session_ids)
        held = {s.session_id for s, epoch in self._listed if epoch == self._epoch_of(s)} - unknown
        for session, epoch in self._listed:  # they may have ended or moved since the attach
            if session.session_id not in self.sessions:
                self.send(self._wire.close_entry(session.session_id, epoch, "replaced"))
        lost = [session for session_id, session in self.sessions.items() if session_id not in held]
        self._listed = []
        self._events.on_up(self, lost)

    def on_result(self: Self, result: ResultT) -> None:
        """Handle a result; drop it if its session or epoch is not current."""
        session = self.sessions.get(result.session_id)
        if session is None or result.epoch != self._epoch_of(session):
            self.on_stray()
            return
        try:
            self._handle(session, result)
        except Exception as error:
            self._events.on_fault(self, session, error)

    def on_stray(self) -> None:
        """A result was dropped."""

    def on_load(self: Self, load: pb.LoadReport) -> None:
        """Note the load, and report it."""
        self._note_load(load)
        self._show_state()
        self._events.on_load(self)

    def on_ended(self: Self, error: Exception) -> None:
        """Go down, and report how the stream ended."""
        was_up, was_draining = self.is_up, self.is_draining
        self.load = None
        if isinstance(error, IncompatibleReplica):
            self._set_connection(LinkState.INCOMPATIBLE, error.message)
        else:
            self._set_connection(LinkState.DOWN, describe(error))
        if was_up:
            self._events.on_down(self, end_of(error, was_draining=was_draining))

    def _note_load(self, load: pb.LoadReport) -> None:
        if load.HasField("drafters"):
            self.drafters = frozenset(load.drafters.names) & DRAFTER_NAMES
            load.ClearField("drafters")  # it may be long, and the load is passed on to drafts and status calls
        self.load, self.num_own_at_load, self.refused_s = load, len(self.sessions), None

    def _set_connection(self, connection: LinkState, detail: str) -> None:
        self._connection, self.detail = connection, detail
        self._show_state()

    def _show_state(self: Self) -> None:
        state, detail = shown = (self.state, self.detail)
        if shown == self._shown:
            return
        self._shown = shown
        log = _log.info if state in _EXPECTED_STATES else _log.warning
        log("replica_state", role=self.role, address=self.address, state=str(state), detail=detail)
        self._events.on_state(self)
