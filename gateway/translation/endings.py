"""Why a choice ended, as clients are told."""

from __future__ import annotations

from types import MappingProxyType

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_REASONS = MappingProxyType(
    {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}
)


def finish_reason(finished: api.ChoiceFinished) -> str:
    """stop, length or abort."""
    return _REASONS.get(finished.reason, "abort")


def stop_reason(finished: api.ChoiceFinished, stop_token_ids: list[int] | None) -> str | int | None:
    """The stop string, or the token of the request's own, that matched; None for the model's end of sequence."""
    match finished.WhichOneof("matched"):
        case "stop_string":
            return finished.stop_string
        case "stop_token_id" if finished.stop_token_id in (stop_token_ids or ()):
            return finished.stop_token_id
    return None
