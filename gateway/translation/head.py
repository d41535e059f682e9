"""What all objects of an answer have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.v1 import coordinator_pb2 as api


@dataclass(slots=True)
class Head:
    """Id and time of an answer, and the model that decides it once that is known."""

    id: str
    created_s: int
    """Since 1970."""
    model: str = ""
    fingerprint: str = ""

    def take(self, started: api.GenerateStarted) -> None:
        """The model is known."""
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
