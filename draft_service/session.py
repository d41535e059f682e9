"""A session as the draft holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.engine.sampling import DraftSample
from specdec.engine.token_history import TokenHistory
from specdec.sampling_params import SamplingParams, VerifyMode
from specdec.v1 import common_pb2 as pb
from specdec.worker.sessions import Session


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """One token of the chain past the committed ones.

    Attributes:
        score: estimated probability that it is accepted if all before it are.
        siblings: runners-up at its position, each with its score.
        sample: the sparse distribution it was drawn from (rejection mode).
        draft_us: the session's share of the step that drafted it.
    """

    token_id: int
    score: float
    siblings: tuple[tuple[int, float], ...]
    sample: DraftSample | None
    draft_us: int


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSession(Session):
    """One choice while its continuation is guessed.

    The sequence holds the committed tokens, then the chain: ``len(seq.token_ids) == num_committed + len(chain)``.

    Attributes:
        body: the OpenSession that began it.
        params, mode: how the target picks and verifies tokens.
        history: counts of the committed tokens.
        num_committed: tokens that are final.
        chain: drafted tokens past them.
        num_sent: leading tokens of the chain that a proposal has carried.
        max_chain: longest chain in rejection mode, where rounds are synchronous; 0 for a session that wants no drafts;
            None in coupled mode, where the growth policy decides.
        is_chain_over: the chain ends the choice, or reached the draft's context: nothing follows until a commit.
        committed_at_s: when the last commit arrived, until a proposal answers it.
    """

    body: pb.OpenSession
    params: SamplingParams
    mode: VerifyMode
    history: TokenHistory
    num_committed: int
    max_chain: int | None
    chain: list[DraftedToken] = field(default_factory=list)
    num_sent: int = 0
    is_chain_over: bool = False
    committed_at_s: float | None = None

    @property
    def is_chain_complete(self) -> bool:
        """Whether nothing is to be added to the chain before the next commit."""
        is_full = self.max_chain is not None and len(self.chain) >= self.max_chain
        return is_full or self.is_chain_over

    @property
    def path_score(self) -> float:
        """Estimated probability that all of the chain is accepted."""
        score = 1.0
        for token in self.chain:
            score *= token.score
        return score
