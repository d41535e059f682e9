"""What of a direct link matters for what can happen to it, at both ends and on the way."""

from __future__ import annotations

from typing import Any

from specdec.replica.bridge.frame_codec import FIRST_DIALLED
from specdec.replica.worker.links import DraftEnd, TargetEnd
from specdec.v1 import common_pb2 as pb

_MOST_FAILURES = 3
"""Failures in a row above which one more makes no difference."""


def of_end(links: Any, now_s: float) -> object:
    """Of one engine's end. Streams count by their order."""
    order = {stream: index for index, stream in enumerate(sorted(links.streams._streams))}
    streams = tuple((stream >= FIRST_DIALLED, len(links.streams._streams[stream].entries)) for stream in order)
    aborted = tuple(sorted(links.streams._aborted))
    if isinstance(links, TargetEnd):
        return (streams, aborted, tuple(_granted(name, state, order) for name, state in links._granted.items()))
    assert isinstance(links, DraftEnd)
    wishes = tuple(_wish(name, wish, order, now_s) for name, wish in links._wishes.items())
    dialled = tuple((target, order.get(stream)) for target, stream in links._dialled.items())
    failures = tuple((each.num, now_s >= each.next_s) for each in links._failures.values())
    return (streams, wishes, dialled, failures)


def _granted(name: str, state: Any, order: dict[int, int]) -> object:
    is_awaited = state.awaited_s is not None
    sent = (state.end, tuple(state.withheld), state.position, state.awaited if is_awaited else None)
    return (name, state.epoch, state.is_suspended, order.get(state.stream_id), sent, state.num_proposals)


def _wish(name: str, wish: Any, order: dict[int, int], now_s: float) -> object:
    num_failures = min(wish.num_failures, _MOST_FAILURES)
    tries = (num_failures, now_s >= wish.next_s, wish.num_overtaken)
    return (name, wish.epoch, wish.target, order.get(wish.stream_id), wish.is_joined, tries)


def of_frame(payload: bytes) -> object:
    """Of what is on its way."""
    try:
        frame = pb.LinkFrame.FromString(payload)
    except Exception:  # what says that a stream was opened is no message
        return len(payload)
    return (frame.HasField("hello"), tuple(map(_entry, frame.entries)))


def _entry(entry: pb.LinkEntry) -> object:
    what: object = None
    match entry.WhichOneof("entry"):
        case "join":
            what = ("join", entry.join.position)
        case "commit":
            what = ("commit", entry.commit.start_position, tuple(entry.commit.token_ids), entry.commit.suspend)
        case "proposal":
            proposal = pb.Proposal.FromString(entry.proposal)
            what = ("proposal", proposal.start_position, tuple(proposal.token_ids), tuple(proposal.parents))
        case "leave":
            what = "leave"
    return (entry.session_id, entry.epoch, what)
