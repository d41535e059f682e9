"""A session of a draft without a model."""

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
    """One choice of a request, as the drafters see it."""

    context: Context
    token_ids: list[int]
    """Committed tokens: the same list as the context's."""
    mode: VerifyMode
    """The target's verification. In rejection mode proposals are chains of point masses."""
    most_tokens: int
    """Tokens of prompt and output at most."""
    max_depth: int
    """Greatest depth of a tree; 0: no drafts are wanted."""
    parts: list[Part] = field(default_factory=list)
    is_suspended: bool = False
    """The target has suspended speculation."""
    is_due: bool = True
    """Its drafters are asked at the next step."""
    told: tuple[int, int, bool] = (0, 0, False)
    """The last proposal's committed length, number of nodes and completeness."""
    committed_at_s: float | None = None
    """Monotonic time of the last commit; None once a proposal has answered it."""

    @property
    def num_committed(self) -> int:
        """Tokens that are final."""
        return len(self.token_ids)
