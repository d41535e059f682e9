"""Stamps of all processes, joined to rounds."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2

STAGES = (
    "target engine decides",
    "target servicer has answer",
    "coordinator has verdict",
    "draft servicer has request",
    "draft engine has commit",
    "draft engine proposes",
    "draft servicer has answer",
    "coordinator has proposal",
    "target servicer has request",
    "in the tree",
)
"""Stages in the order of a round."""
DIRECT_STAGES = tuple(stage for stage in STAGES if "engine" in stage or stage == STAGES[-1])
"""Stages of a round on a direct link, which on one host leads from engine to engine."""
Key = tuple[str, int]
"""A session and the position at which the next token stands."""


def read_stamps(folder: Path) -> dict[str, dict[Key, int]]:
    """First time at which each round reached each stage, in nanoseconds of one clock."""
    reached: dict[str, dict[Key, int]] = {stage: {} for stage in STAGES}
    for file in folder.glob("*.stamps"):
        with file.open("rb") as opened:
            stamps: list[tuple[str, int, Any]] = pickle.load(opened)
        for stage, at_ns, body in stamps:
            for key in _keys(stage, body):
                reached[stage].setdefault(key, at_ns)
    return reached


def rounds(
    reached: Mapping[str, Mapping[Key, int]], spans_ns: Sequence[tuple[int, int]], stages: Sequence[str]
) -> tuple[list[list[int]], int]:
    """Times of the complete rounds that began within the intervals, and the number of all rounds that began in them."""
    complete: list[list[int]] = []
    began = reached[stages[0]]
    num_begun = 0
    for key, at_ns in began.items():
        if not any(from_ns <= at_ns < until_ns for from_ns, until_ns in spans_ns):
            continue
        num_begun += 1
        times = [reached[stage].get(key) for stage in stages]
        known = [time for time in times if time is not None]
        if len(known) == len(times) and known == sorted(known):
            complete.append(known)
    return complete, num_begun


def _keys(stage: str, body: Any) -> Iterator[Key]:
    match stage:
        case "target servicer has answer" | "draft servicer has answer" if body[0]:
            yield from _link_keys(body[1])
        case "target servicer has request" | "draft servicer has request" if body[0]:
            yield from _link_keys(body[1])
        case "target servicer has answer":
            for result in target_pb2.VerifyResponse.FromString(body[1]).results:
                if result.WhichOneof("result") == "verdict":
                    yield result.session_id, _end(result.verdict)
        case "draft servicer has request":
            for entry in draft_pb2.DraftRequest.FromString(body[1]).entries:
                if entry.WhichOneof("entry") == "commit":
                    yield entry.session_id, _end(entry.commit)
        case "draft servicer has answer":
            for answer in draft_pb2.DraftResponse.FromString(body[1]).results:
                if answer.WhichOneof("result") == "proposal":
                    yield answer.session_id, _start(answer.proposal)
        case "coordinator has proposal":
            yield body[0], _start(body[1])
        case "target servicer has request":
            for target_entry in target_pb2.VerifyRequest.FromString(body[1]).entries:
                if target_entry.WhichOneof("entry") == "proposal":
                    yield target_entry.session_id, _start(target_entry.proposal)
        case _:
            yield from body


def _link_keys(frame: bytes) -> Iterator[Key]:
    for entry in pb.LinkFrame.FromString(frame).entries:
        match entry.WhichOneof("entry"):
            case "commit":
                yield entry.session_id, _end(entry.commit)
            case "proposal":
                yield entry.session_id, _start(entry.proposal)


def _end(said: pb.Verdict | pb.Commit) -> int:
    return int(said.start_position) + len(said.token_ids)


def _start(encoded: bytes) -> int:
    return int(pb.Proposal.FromString(encoded).start_position)


def between(times: Sequence[Sequence[int]], first: int, last: int) -> list[float]:
    """Milliseconds from one stage to another, by round."""
    return [(each[last] - each[first]) / 1e6 for each in times]
