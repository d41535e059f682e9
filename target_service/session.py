"""A session as the target holds it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.sequence import Sequence
from specdec.sampling_params import SamplingParams, VerifyMode
from specdec.v1 import common_pb2 as pb
from specdec.worker.sessions import Session
from target_service.speculation_tree import SpeculationTree
from target_service.walk import EndOfChoice


@dataclass(slots=True, eq=False, kw_only=True)
class TargetSession(Session):
    """One choice while it decodes.

    Attributes:
        seq: its tokens and KV; None while it waits for the prompt that it is forked from, and after its end.
        body: the OpenSession that began it; its tokens are those of the sequence until the sequence exists.
        params, mode, end: how tokens are picked, verified, and when the choice ends.
        history: token counts for penalties and positions.
        tree: proposals below the last committed token.
        arrived: the latest proposal not yet in the tree; it carries all that earlier ones did.
        max_nodes: most nodes verified in one step; 0 without speculation.
        credit_position: the session pauses when it has committed this many tokens.
        sent: verdicts that the owner has not acknowledged, oldest first.
        prompt_logprobs: of the prompt's tokens after the first, while prefill goes on.
        opened_at_s, first_step_at_s, last_verdict_at_s: monotonic times.
        is_undecided: a verdict was sent and the next step's hold-off is not planned yet.
        held_since_s: when the hold-off began; a draft's answer is timed from here.
        wanted_depth: depth of the tree that the next step waits for, until `hold_until_s`.
        episode: depth waited for at the last miss, when that was, and the number of tokens then.
        num_unanswered: verdicts in a row to which no proposal came in time.
        had_proposal: a usable proposal was at hand when the next step could first be formed.
    """

    seq: Sequence | None
    body: pb.OpenSession
    params: SamplingParams
    mode: VerifyMode
    end: EndOfChoice
    history: TokenHistory
    tree: SpeculationTree
    arrived: bytes | None = None
    max_nodes: int
    credit_position: int
    opened_at_s: float
    sent: deque[pb.Verdict] = field(default_factory=deque)
    prompt_logprobs: list[pb.PositionLogprobs] = field(default_factory=list)
    first_step_at_s: float | None = None
    has_decided: bool = False
    last_verdict_at_s: float | None = None
    is_undecided: bool = False
    wanted_depth: int = 0
    hold_until_s: float = 0.0
    held_since_s: float | None = None
    num_unanswered: int = 0
    episode: tuple[int, float, int] | None = None
    had_proposal: bool = False

    @property
    def token_ids(self) -> list[int]:
        """Committed tokens, prompt included."""
        return self.seq.token_ids if self.seq is not None else list(self.body.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.seq.token_ids) if self.seq is not None else len(self.body.token_ids)
