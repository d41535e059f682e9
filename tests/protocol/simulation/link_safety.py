"""What a direct link may do: only the granted draft, on the stream on which it joined, changes a session.

Each end is watched from outside: the watcher keeps its own account of grants and joins.
"""

from __future__ import annotations

from typing import Any

from specdec.drafting.role.session import DraftSession
from specdec.replica.worker.links import LinkEnd
from specdec.target_service.session import TargetSession
from specdec.v1 import common_pb2 as pb
from tests.protocol.simulation.safety import Violations

_LEAST_KEY_BYTES = 16


class LinkSafety:
    """Watches one engine's end of its links, from the engine's start on."""

    def __init__(self, name: str, links: LinkEnd[Any], violations: Violations) -> None:
        self._name = name
        self._links: Any = links
        self._violations = violations
        self._granted: dict[str, pb.LinkGrant] = {}
        self._joined: dict[str, int] = {}
        """Stream of each session: at a target the one that joined, at a draft the one on which it asked to join."""
        grant, handle, put = self._links.granted, self._links._is_handled, self._links.streams.put
        left = self._links._left

        def on_grant(session: Any, granted: pb.LinkGrant) -> None:
            grant(session, granted)
            self._granted[session.session_id] = pb.LinkGrant.FromString(granted.SerializeToString())
            if isinstance(session, TargetSession):
                self._joined.pop(session.session_id, None)

        def on_entry(stream_id: int, entry: pb.LinkEntry) -> bool:
            return self._watched(stream_id, entry, lambda: handle(stream_id, entry))

        def on_put(stream_id: int | None, session_id: str, epoch: int, **action: Any) -> bool:
            if "join" in action and stream_id is not None:
                self._joined[session_id] = stream_id
            elif "leave" in action and self._joined.get(session_id) == stream_id:
                self._joined.pop(session_id, None)
            done: bool = put(stream_id, session_id, epoch, **action)
            return done

        def on_left(stream_id: int, reason: str) -> None:
            self._joined = {name: stream for name, stream in self._joined.items() if stream != stream_id}
            left(stream_id, reason)

        self._links.granted, self._links._is_handled = on_grant, on_entry
        self._links.streams.put, self._links._left = on_put, on_left

    def _watched(self, stream_id: int, entry: pb.LinkEntry, handle: Any) -> bool:
        session = self._links._host.sessions.get(entry.session_id)
        if session is None:
            return bool(handle())
        kind, before = entry.WhichOneof("entry"), self._picture(session)
        if is_right := self._belongs(session, stream_id, entry):
            if kind == "leave":
                self._joined.pop(entry.session_id, None)
            elif kind == "join":
                self._joined[entry.session_id] = stream_id
        is_handled: bool = handle()
        is_same = self._picture(session) == before
        self._violations.check(is_right or is_same, self._name, "was changed by", kind, "of no joined link:", entry)
        return is_handled

    def _belongs(self, session: Any, stream_id: int, entry: pb.LinkEntry) -> bool:
        """Whether the coordinator's latest grant allows the entry on this stream."""
        grant = self._granted.get(session.session_id)
        if grant is None or grant.epoch != entry.epoch or len(grant.key) < _LEAST_KEY_BYTES:
            return False
        if entry.WhichOneof("entry") == "join":
            is_known = isinstance(session, TargetSession) and entry.join.position <= len(session.token_ids)
            return is_known and entry.join.key == grant.key
        return self._joined.get(session.session_id) == stream_id

    def _picture(self, session: Any) -> tuple[Any, ...]:
        """What of a session a link may change."""
        session_id = session.session_id
        if isinstance(session, TargetSession):
            state = self._links._granted.get(session_id)
            joined = None if state is None else (state.stream_id, state.position, state.num_proposals)
            return (session.num_tokens, session.arrived, len(session.tree), joined)
        assert isinstance(session, DraftSession)
        wish = self._links._wishes.get(session_id)
        joined = None if wish is None else (wish.stream_id, wish.is_joined)
        return (session.num_committed, session.num_unsent, len(session.tree), joined)
