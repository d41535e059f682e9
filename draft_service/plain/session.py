"""A session as drafters without a model hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.drafting.interface import Context, SessionDrafter
from specdec.replica.worker.sessions import EngineSession
from specdec.wire.sampling_params import VerifyMode


@dataclass(slots=True)
class Part:
    """A drafter's part of a session."""

    name: str
    drafter: SessionDrafter


@dataclass(slots=True, eq=False, kw_only=True)
class PlainSession(EngineSession):
    """One choice while its continuation is looked up or asked for."""

    context: Context
    token_ids: list[int]
    """Committed tokens; those of the context."""
    mode: VerifyMode
    """How the target verifies: in rejection mode chains only, each token a point mass."""
    most_tokens: int
    """Length of the sequence when it is over."""
    max_depth: int
    """Of a tree; 0: it wants no drafts."""
    parts: list[Part] = field(default_factory=list)
    is_suspended: bool = False
    """Nobody wants proposals now."""
    is_due: bool = True
    """Its drafters are asked at the next step."""
    told: tuple[int, int, bool] = (0, 0, False)
    """Committed tokens and nodes of the last proposal, and whether it was complete."""
    committed_at_s: float | None = None
    """When the last commit arrived, until a proposal answers it."""

    @property
    def num_committed(self) -> int:
        """Tokens that are final."""
        return len(self.token_ids)
