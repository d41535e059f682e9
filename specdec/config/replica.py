"""Settings that targets and drafts have in common."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from specdec.config.retired import REMOVED_FROM_REPLICAS
from specdec.engine.settings import EngineSettings
from specdec.service.settings import ReplicaServiceSettings

VerifyModeName = Literal["coupled", "rejection"]
RejectionMethodName = Literal["standard", "block"]


class ReplicaSettings(ReplicaServiceSettings, EngineSettings):
    """What targets and drafts have in common: an engine behind a gRPC server."""

    removed: ClassVar[frozenset[str]] = REMOVED_FROM_REPLICAS

    model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name clients use; null: the last part of the model's path or id.",
    )
    max_sessions: int = Field(default=256, ge=1, description="Most sessions at once.")
    verify_mode: VerifyModeName = Field(
        default="coupled", description="Verification of proposals where a session names no mode."
    )

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.model_name or Path(self.model).name
