"""The first fields of all answers, and the reasons why choices end."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_REASONS = MappingProxyType(
    {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}
)


@dataclass(slots=True)
class AnswerHead:
    """Id and time of an answer, and the model once it is known."""

    id: str
    created_s: int
    """Unix time."""
    model: str = ""
    fingerprint: str = ""

    def take(self, started: api.GenerateStarted) -> None:
        """Take the model from the first chunk."""
        self.model, self.fingerprint = started.model.name, started.model.numerics_id

    def fields(self, kind: str) -> dict[str, Any]:
        """The first fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def is_thinking(started: api.GenerateStarted) -> bool | None:
    """Whether the rendered prompt ends within a think section; None: unknown."""
    return started.is_thinking if started.HasField("is_thinking") else None


def finish_reason(finished: api.ChoiceFinished) -> str:
    """stop, length or abort."""
    return _REASONS.get(finished.reason, "abort")


def stop_reason(finished: api.ChoiceFinished, stop_token_ids: list[int] | None) -> str | int | None:
    """The matched stop string or stop token of the request; None for the model's end of sequence."""
    match finished.WhichOneof("matched"):
        case "stop_string":
            return finished.stop_string
        case "stop_token_id" if finished.stop_token_id in (stop_token_ids or ()):
            return finished.stop_token_id
    return None
