"""The draft's end: joins sessions at their targets, takes tokens from there and sends proposals back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.replica.bridge.frame_codec import FIRST_DIALLED
from specdec.replica.bridge.frames import FrameKind
from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.links.link_end import LEAST_KEY_BYTES, LinkEnd
from specdec.replica.worker.sessions import SessionT
from specdec.v1 import common_pb2 as pb
from specdec.wire.backoff import Backoff

_JOIN = Backoff(0.05, 5.0)
"""Waits between attempts to join a session: a grant may arrive at the draft before it arrives at the target."""
_DIAL = Backoff(0.25, 30.0)
"""Waits between attempts to reach a target."""
_MOST_OVERTAKEN = 2
"""Commits in a row, relayed by the coordinator with news for a session that has joined, after which it leaves the
link: the link is slower than the relay."""
_MOST_TARGETS = 256
"""Targets to which there are streams, and whose failures are remembered."""


@dataclass(slots=True)
class _Wish:
    """A session that may join its target."""

    key: bytes
    target: str
    epoch: int
    stream_id: int | None = None
    """The stream on which it asked to join; None: it has not, or the stream is gone."""
    is_joined: bool = False
    num_failures: int = 0
    next_s: float = 0.0
    """Time of the next attempt, at the earliest."""
    num_overtaken: int = 0


@dataclass(slots=True)
class _Failures:
    num: int = 0
    next_s: float = 0.0


class DraftEnd(LinkEnd[SessionT]):
    """Sessions that have not joined ask again when a relayed commit comes."""

    def __init__(self, *args: Any, max_model_len: int) -> None:
        """`max_model_len`: context of the draft; a session's end in it is the coordinator's business."""
        super().__init__(*args)
        self._max_model_len = max_model_len
        self._wishes: dict[str, _Wish] = {}
        self._dialled: dict[str, int] = {}
        """Open streams by target."""
        self._shorter: dict[int, int] = {}
        """Sockets to targets on this host, by the stream that told of them."""
        self._failures: dict[str, _Failures] = {}
        self._next_stream_id = FIRST_DIALLED

    def granted(self, session: SessionT, grant: pb.LinkGrant) -> None:
        """See `LinkEnd.granted`."""
        former = self._wishes.pop(session.session_id, None)
        if former is not None and former.is_joined:
            self._say_leave(session.session_id, former, "another grant")
            self._tell(session, is_direct=False, reason="another grant")
        if len(grant.key) >= LEAST_KEY_BYTES and grant.target:
            wish = self._wishes[session.session_id] = _Wish(grant.key, grant.target, session.epoch)
            self._ask(session, wish)

    def takes(self, session: SessionT, body: dict[str, Any]) -> bool:
        """Send a proposal to the target, if the session has joined."""
        proposal, wish = body.get("proposal"), self._wishes.get(session.session_id)
        if proposal is None or wish is None or not wish.is_joined:
            return False
        if self.streams.put(wish.stream_id, session.session_id, wish.epoch, proposal=proposal):
            return True
        self._leave(session, wish, "a proposal exceeds the target's message limit")
        return False

    def ended(self, session: SessionT) -> None:
        """See `LinkEnd.ended`."""
        wish = self._wishes.pop(session.session_id, None)
        if wish is not None and wish.is_joined:
            self._say_leave(session.session_id, wish, "the session ended")

    def before_entry(self, session: SessionT) -> int:
        """See `LinkEnd.before_entry`."""
        return self._role.position(session) if session.session_id in self._wishes else 0

    def after_entry(self, session: SessionT, position: int) -> None:
        """Ask to join after a relayed commit; leave a link that is slower than the relay."""
        wish = self._wishes.get(session.session_id)
        if wish is None:
            return
        if not wish.is_joined:
            self._ask(session, wish)
        elif self._role.position(session) > position:
            wish.num_overtaken += 1
            if wish.num_overtaken > _MOST_OVERTAKEN:
                self._leave(session, wish, "relayed commits arrive first")

    def _ask(self, session: SessionT, wish: _Wish) -> None:
        now_s = self._clock()
        if now_s < wish.next_s:
            return
        wish.num_failures += 1
        wish.next_s = now_s + _JOIN.wait_s(wish.num_failures)
        wish.stream_id = self._dialled.get(wish.target) or self._dial(wish.target, now_s)
        if wish.stream_id is not None:
            wish.stream_id = self._shorter.get(wish.stream_id, wish.stream_id)
        self._join(session, wish)

    def _join(self, session: SessionT, wish: _Wish) -> None:
        join = pb.LinkJoin(key=wish.key, position=self._role.position(session))
        self.streams.put(wish.stream_id, session.session_id, wish.epoch, join=join)

    def _dial(self, target: str, now_s: float) -> int | None:
        failures = self._failures.get(target)
        if len(self._dialled) >= _MOST_TARGETS or (failures is not None and now_s < failures.next_s):
            return None
        stream_id = self._dialled[target] = self._next_stream_id
        self._next_stream_id += 1
        self._port.send(FrameKind.LINK_DIAL, stream_id, target.encode())
        self.streams.opened(stream_id)
        return stream_id

    def _greeted(self, stream_id: int, hello: pb.LinkHello) -> None:
        """Take the shorter way to a target on this host, for its present sessions too: they join again."""
        target = next((target for target, dialled in self._dialled.items() if dialled == stream_id), None)
        if target is None or not hello.socket_path or stream_id in self._shorter:
            return
        if (local := self._port.local.connect(hello.socket_path)) is None:
            return
        self._shorter[stream_id] = local
        self.streams.opened(local)
        for session_id, wish in self._wishes.items():
            session = self._host.sessions.get(session_id)
            if wish.stream_id == stream_id and session is not None:
                wish.stream_id = local
                self._join(session, wish)

    def _entry(self, stream_id: int, session: SessionT | None, entry: pb.LinkEntry) -> bool:
        kind, wish = entry.WhichOneof("entry"), self._wishes.get(entry.session_id)
        if session is None or wish is None or wish.stream_id != stream_id or wish.epoch != entry.epoch:
            return False
        if kind == "leave":
            self._off(session, wish, entry.leave.reason)
        elif kind == "commit":
            self._commit(session, wish, entry.commit)
        return True

    def _commit(self, session: SessionT, wish: _Wish, commit: pb.Commit) -> None:
        if commit.start_position > self._role.position(session):
            self._leave(session, wish, "the link lost a commit")
            return
        if commit.start_position + len(commit.token_ids) >= self._max_model_len:
            self._leave(session, wish, "the draft's context ends")
            return
        wish.num_overtaken = 0
        try:
            self._role.entry(session, "commit", commit)
        except SessionFailure as failure:  # the coordinator's commits decide
            wish.next_s = float("inf")
            self._leave(session, wish, f"the target's tokens were refused: {failure}")
            return
        except Exception as error:
            self._fail(session, self._host.faults.failure(error))
            return
        if not wish.is_joined:
            wish.is_joined, wish.num_failures = True, 0
            self._failures.pop(wish.target, None)
            self.streams.used(wish.stream_id or 0)
            self._tell(session, is_direct=True)

    def _leave(self, session: SessionT, wish: _Wish, reason: str) -> None:
        self._say_leave(session.session_id, wish, reason)
        self._off(session, wish, reason)

    def _off(self, session: SessionT, wish: _Wish, reason: str) -> None:
        """The session is on no link: its coordinator relays, from the position told."""
        wish.is_joined, wish.num_overtaken, wish.stream_id = False, 0, None
        wish.next_s = max(wish.next_s, self._clock() + _JOIN.wait_s(max(1, wish.num_failures)))
        self._tell(session, is_direct=False, reason=reason)

    def _left(self, stream_id: int, reason: str) -> None:
        self._shorter = {dialled: local for dialled, local in self._shorter.items() if local != stream_id}
        if (local := self._shorter.pop(stream_id, None)) is not None:
            self._abort(local, "LINK_ENDED", reason)
        for target, dialled in list(self._dialled.items()):
            if dialled == stream_id:
                del self._dialled[target]
                if len(self._failures) >= _MOST_TARGETS:
                    self._failures.clear()
                failures = self._failures.setdefault(target, _Failures())
                failures.num += 1
                failures.next_s = self._clock() + _DIAL.wait_s(failures.num)
        for session_id, wish in self._wishes.items():
            session = self._host.sessions.get(session_id)
            if wish.stream_id == stream_id and session is not None:
                self._off(session, wish, reason)

    def _say_leave(self, session_id: str, wish: _Wish, reason: str) -> None:
        self.streams.put(wish.stream_id, session_id, wish.epoch, leave=pb.LinkLeave(reason=reason))

    def _tell(self, session: SessionT, *, is_direct: bool, reason: str = "") -> None:
        position = self._role.position(session)
        self._host.emit(session, link=pb.LinkState(is_direct=is_direct, position=position, reason=reason))
