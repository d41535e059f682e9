"""The target's end: sends tokens to the draft that joined a session, and takes its proposals."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Any

from specdec.replica.worker.links.link_end import LEAST_KEY_BYTES, LinkEnd
from specdec.replica.worker.sessions import SessionT
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import MAX_PROPOSAL_BYTES, microseconds
from specdec.wire.proposals import MOST_PROPOSALS, MOST_PROPOSED_BYTES, start_position

_ANSWER_WEIGHT = 0.125
"""Weight of the last answer in the mean: about eight answers count."""


@dataclass(slots=True)
class _Granted:
    """A session whose link a coordinator has granted."""

    key: bytes
    epoch: int
    """Epoch of the opening at the draft."""
    is_suspended: bool = False
    """The draft was last told, on whatever way, to stop drafting."""
    stream_id: int | None = None
    """The stream on which the draft has joined; None: it has not."""
    end: int = 0
    """Position after the last token sent or withheld."""
    withheld: list[int] = field(default_factory=list)
    """Tokens kept for a suspended draft."""
    position: int = 0
    """Start position of the latest proposal."""
    awaited: int = 0
    """End of the first commit without an answer."""
    awaited_s: float | None = None
    """Time of that commit; None: all are answered."""
    answer_s: float = 0.0
    """Mean time to answer a commit; 0: not measured."""
    num_proposals: int = 0
    """Proposals since the last commit."""
    num_proposed_bytes: int = 0

    def proposed(self, proposal: bytes, now_s: float) -> bool:
        """Note a proposal; whether it is one of those that a target can use."""
        self.num_proposals += 1
        self.num_proposed_bytes += len(proposal)
        if self.num_proposals > MOST_PROPOSALS or self.num_proposed_bytes > MOST_PROPOSED_BYTES:
            return False
        start = start_position(proposal)
        if start is not None and start <= self.end:
            self.position = start
            if self.awaited_s is not None and start >= self.awaited:
                took_s, self.awaited_s = now_s - self.awaited_s, None
                self.answer_s += (took_s - self.answer_s) * (_ANSWER_WEIGHT if self.answer_s else 1.0)
        return True

    def committed(self, now_s: float) -> None:
        """A commit is sent: a proposal is due."""
        self.num_proposals = self.num_proposed_bytes = 0
        if self.awaited_s is None:
            self.awaited_s, self.awaited = now_s, self.end


class TargetEnd(LinkEnd[SessionT]):
    """A draft joins a session only with the key of its coordinator's latest grant."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._granted: dict[str, _Granted] = {}

    def granted(self, session: SessionT, grant: pb.LinkGrant) -> None:
        """See `LinkEnd.granted`."""
        former = self._granted.pop(session.session_id, None)
        if former is not None:
            self._leave(session.session_id, former, "another grant replaced the draft's")
        if len(grant.key) >= LEAST_KEY_BYTES:
            is_suspended = former is not None and former.is_suspended
            self._granted[session.session_id] = _Granted(grant.key, grant.epoch, is_suspended)

    def takes(self, session: SessionT, body: dict[str, Any]) -> bool:
        """Send a verdict's tokens to the draft too, and say so in the verdict. Verdicts sent again change nothing."""
        verdict: pb.Verdict | None = body.get("verdict")
        state = None if verdict is None else self._granted.get(session.session_id)
        if verdict is None or state is None:
            return False
        if state.stream_id is not None and verdict.start_position != state.end:
            return False
        was_suspended, state.is_suspended = state.is_suspended, verdict.suspends_draft
        if state.stream_id is None or verdict.finish_reason:
            return False
        state.withheld.extend(verdict.token_ids)
        state.end += len(verdict.token_ids)
        if not (was_suspended and state.is_suspended) and not self._commit(session.session_id, state):
            self._leave(session.session_id, state, "a commit exceeds the draft's message limit")
            return False
        linked = verdict.linked
        linked.epoch, linked.position, linked.answer_us = state.epoch, state.position, microseconds(state.answer_s)
        return False

    def ended(self, session: SessionT) -> None:
        """See `LinkEnd.ended`. The draft hears of it from the coordinator."""
        self._granted.pop(session.session_id, None)

    def _commit(self, session_id: str, state: _Granted) -> bool:
        """Send the withheld tokens; False if that is not possible."""
        tokens, state.withheld = state.withheld, []
        if state.is_suspended:
            state.awaited_s = None
        else:
            state.committed(self._clock())
        commit = pb.Commit(start_position=state.end - len(tokens), token_ids=tokens, suspend=state.is_suspended)
        return self.streams.put(state.stream_id, session_id, state.epoch, commit=commit)

    def _entry(self, stream_id: int, session: SessionT | None, entry: pb.LinkEntry) -> bool:
        kind, state = entry.WhichOneof("entry"), self._granted.get(entry.session_id)
        if kind == "join":
            return self._join(stream_id, session, state, entry)
        if session is None or state is None or state.stream_id != stream_id or state.epoch != entry.epoch:
            return False
        if kind == "leave":
            state.stream_id = None
        elif kind == "proposal":
            self._propose(session, state, entry.proposal)
        return True

    def _join(self, stream_id: int, session: SessionT | None, state: _Granted | None, entry: pb.LinkEntry) -> bool:
        refusal = "the target has no such grant"
        is_granted = session is not None and state is not None and state.epoch == entry.epoch
        if session is not None and state is not None and is_granted and hmac.compare_digest(state.key, entry.join.key):
            tokens, position = self._role.token_ids(session), entry.join.position
            if position <= len(tokens):
                self.streams.used(stream_id)
                state.stream_id, state.end, state.withheld = stream_id, len(tokens), list(tokens[position:])
                state.position = state.num_proposals = state.num_proposed_bytes = 0
                if self._commit(session.session_id, state):
                    return True
                state.stream_id = None
            refusal = f"position {position} cannot be joined"
        self.streams.put(stream_id, entry.session_id, entry.epoch, leave=pb.LinkLeave(reason=refusal))
        return False

    def _propose(self, session: SessionT, state: _Granted, proposal: bytes) -> None:
        """Hand on a proposal. A draft that sends too much goes back to the relay, which knows what to do with it."""
        if len(proposal) > MAX_PROPOSAL_BYTES or not state.proposed(proposal, self._clock()):
            self._leave(session.session_id, state, "the draft's proposals are too many or too large")
            return
        try:
            self._role.entry(session, "proposal", proposal)
        except Exception as error:
            self._fail(session, self._host.faults.failure(error))

    def _leave(self, session_id: str, state: _Granted, reason: str) -> None:
        self.streams.put(state.stream_id, session_id, state.epoch, leave=pb.LinkLeave(reason=reason))
        state.stream_id = None

    def _left(self, stream_id: int, reason: str) -> None:
        for state in self._granted.values():
            if state.stream_id == stream_id:
                state.stream_id = None
