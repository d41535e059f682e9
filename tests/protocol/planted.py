"""Defects that the product does not have: each is put in for one test, which has to find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import specdec.coordinator.intake.resume
from specdec.coordinator.decode_loop import DecodeLoop
from specdec.coordinator.finishing import Finisher
from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.recovery.moves import TargetMoves
from specdec.replica.worker.links import DraftEnd, LinkEnd, TargetEnd
from specdec.replica.worker.owner_streams import OwnerStreams
from specdec.store.memory import MemoryStore
from specdec.target_service.session import TargetSession
from specdec.target_service.verifier import Verifier
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class Defect:
    """What does something else while it is there."""

    owner: Any
    name: str
    make: Callable[[Any], Callable[..., Any]]
    """Makes what is put in place of what is there."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The product has it."""
        with patch.object(self.owner, self.name, self.make(getattr(self.owner, self.name))):
            yield


def _results_of_any_epoch(_: Any) -> Callable[..., None]:
    def on_result(link: ReplicaLink[Any, Any, Any], result: Any) -> None:
        if (session := link.sessions.get(result.session_id)) is not None:
            link._handle(session, result)

    return on_result


def _openings_of_any_epoch(_: Any) -> Callable[..., bool]:
    def replace(owners: OwnerStreams[Any], current: Any, owner: Any, entry: Any) -> bool:
        owners.end(current, "reopened")
        return True

    return replace


def _verdict_from(place: Callable[[int, int], int]) -> Callable[[Any], Callable[..., None]]:
    """Verdicts are taken for ones that begin elsewhere: `place` gets the coordinator's position, and the verdict's."""

    def make(honest: Callable[..., None]) -> Callable[..., None]:
        def on_verdict(loop: DecodeLoop, session: Any, verdict: pb.Verdict) -> None:
            moved = pb.Verdict()
            moved.CopyFrom(verdict)
            moved.start_position = place(session.position, verdict.start_position)
            honest(loop, session, moved)

        return on_verdict

    return make


def _no_credit_needed(_: Any) -> Callable[..., None]:
    def update_pause(session: TargetSession) -> None:
        if session.has_seq:
            session.seq.paused = not session.may_step

    return update_pause


def _acknowledges_what_is_to_come(_: Any) -> Callable[..., None]:
    def give_credit(link: TargetLink, session: Any) -> None:
        side = session.target
        credit = pb.Credit(position=side.credit_position, acknowledged_position=side.credit_position)
        link.send(target_pb2.TargetEntry(session_id=session.session_id, epoch=side.epoch, credit=credit))

    return give_credit


def _lease_of_the_same_generation(honest: Callable[..., Any]) -> Callable[..., Any]:
    async def begin(store: MemoryStore, key: Any, request: Any) -> Any:
        held = store._state.requests.get(key)
        before = None if held is None else held.generation
        begun = await honest(store, key, request)
        if before is not None:
            store._state.requests[key].generation = before
        return begun

    return begin


def _nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _no_tokens(_: Any) -> Callable[..., list[int]]:
    return lambda *args, **kwargs: []


def _entries_of_any_epoch(honest: Callable[..., bool]) -> Callable[..., bool]:
    def entry(end: LinkEnd[Any], stream_id: int, session: Any, got: pb.LinkEntry) -> bool:
        granted: Any = getattr(end, "_granted", None) or getattr(end, "_wishes", {})
        forged = pb.LinkEntry()
        forged.CopyFrom(got)
        if (state := granted.get(got.session_id)) is not None:
            forged.epoch = state.epoch
        return honest(end, stream_id, session, forged)

    return entry


def _proposals_of_any_link(honest: Callable[..., bool]) -> Callable[..., bool]:
    def entry(end: TargetEnd[Any], stream_id: int, session: Any, got: pb.LinkEntry) -> bool:
        state = end._granted.get(got.session_id)
        if got.WhichOneof("entry") == "proposal" and state is not None and state.epoch == got.epoch:
            end._propose(session, state, got.proposal)
            return True
        return honest(end, stream_id, session, got)

    return entry


def _joins_with_any_key(honest: Callable[..., bool]) -> Callable[..., bool]:
    def join(end: TargetEnd[Any], stream_id: int, session: Any, state: Any, entry: pb.LinkEntry) -> bool:
        forged = pb.LinkEntry()
        forged.CopyFrom(entry)
        forged.join.key = b"" if state is None else state.key
        return honest(end, stream_id, session, state, forged)

    return join


ON_LINKS = {
    "a target takes entries of another epoch from a link": Defect(TargetEnd, "_entry", _entries_of_any_epoch),
    "a draft takes entries of another epoch from a link": Defect(DraftEnd, "_entry", _entries_of_any_epoch),
    "a target takes proposals from a link that has not joined": Defect(TargetEnd, "_entry", _proposals_of_any_link),
    "a target lets any key join": Defect(TargetEnd, "_join", _joins_with_any_key),
}

ON_EXPLORATIONS = {
    "the coordinator takes results of an earlier epoch": (
        "swap", Defect(ReplicaLink, "on_result", _results_of_any_epoch)),
    "a target opens a session again under the same epoch": (
        "repeat", Defect(OwnerStreams, "_replace", _openings_of_any_epoch)),
    "a verdict that comes twice is applied twice": (
        "repeat-two-tokens", Defect(DecodeLoop, "on_verdict", _verdict_from(lambda ours, theirs: ours))),
    "a verdict after a gap is applied": (
        "loss", Defect(DecodeLoop, "on_verdict", _verdict_from(min))),
    "a target needs no credit": ("faultless", Defect(TargetSession, "update_pause", _no_credit_needed)),
    "a client that reads gives no credit": ("faultless", Defect(TargetLink, "give_credit", _nothing)),
    "an attach does not bring what was lost": ("cut", Defect(Verifier, "resend", _nothing)),
    "what a target that was restarted has lost is not opened again": (
        "target", Defect(TargetMoves, "came_up", _nothing)),
}  # fmt: skip
"""Each with the bounds within which it shows."""

ON_RUNS = {
    "a resumed request forgets its tokens": Defect(specdec.coordinator.intake.resume, "agree", _no_tokens),
    "a request that another took up goes on": Defect(Finisher, "take_over", _nothing),
    "a lease that is taken over keeps its generation": Defect(MemoryStore, "begin", _lease_of_the_same_generation),
    "more is acknowledged than has arrived": Defect(TargetLink, "give_credit", _acknowledges_what_is_to_come),
}
