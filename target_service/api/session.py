"""A session as a target behind an endpoint holds it: its tokens, and what drafts said of the next ones."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from specdec.replica.worker.sessions import EngineSession
from specdec.target_service.tree.walk import EndOfChoice
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import SamplingParams

_MOST_BYTES = 64 * 2**10
_MOST_NODES = 64


@dataclass(slots=True, eq=False, kw_only=True)
class ApiSession(EngineSession):
    """One choice while it decodes."""

    params: SamplingParams
    end: EndOfChoice
    token_ids: list[int]
    """Committed tokens."""
    num_prompt_tokens: int
    max_draft_tokens: int
    """Most proposed tokens of a call; 0: no proposals are verified."""
    credit_position: int
    """Tokens may be committed below it."""
    chain: tuple[int, list[int]] = (0, [])
    """The main path of the last proposal, and where it starts."""
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None
    due_at_s: float = 0.0
    """Its next call waits for a draft until then, or after a failure."""
    num_failures: int = 0
    """Calls in a row that failed."""
    told_at_s: float = 0.0
    """When its owner last heard of it."""

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def is_over(self) -> bool:
        """Whether its last token is committed."""
        return self.finish_reason != pb.FINISH_REASON_UNSPECIFIED

    def propose(self, encoded: bytes) -> None:
        """Remember a proposal's main path: the first child, from the root down. Raises ValueError for what is none."""
        if len(encoded) > _MOST_BYTES:
            raise ValueError(f"proposal: {len(encoded)} bytes, at most {_MOST_BYTES} are read")
        try:
            proposal = pb.Proposal.FromString(encoded)
        except DecodeError:
            raise ValueError("proposal: does not parse") from None
        num_nodes = len(proposal.token_ids)
        if num_nodes > _MOST_NODES or len(proposal.parents) not in (0, num_nodes):
            raise ValueError("proposal: is no tree of at most 64 nodes")
        parents = list(proposal.parents) or list(range(-1, num_nodes - 1))
        path: list[int] = []
        node = -1
        for index, parent in enumerate(parents):
            if parent == node:
                node = index
                path.append(proposal.token_ids[index])
        self.chain = proposal.start_position, path

    def drafted(self) -> list[int]:
        """What of the last proposal's main path continues the committed tokens, as far as is worth verifying."""
        start, path = self.chain
        known = self.token_ids[start:]
        if start > self.num_tokens or path[: len(known)] != known:
            return []
        most = min(
            self.max_draft_tokens, self.end.max_depth(self.num_tokens), self.credit_position - self.num_tokens - 1
        )
        return path[len(known) :][: max(0, most)]

    def commit(self, tokens: list[int], drafted: list[int]) -> tuple[list[int], int]:
        """Commit what a call decided: `tokens` are the target's after the committed ones and after each drafted one.

        Returns what was committed, up to the choice's end, and how many of it were accepted draft tokens.
        """
        committed: list[int] = []
        num_accepted = 0
        for index, token in enumerate(tokens):
            committed.append(token)
            is_accepted = index < len(drafted) and drafted[index] == token
            num_accepted += is_accepted
            self.finish_reason, self.stop_token_id = self.end.check(token, self.num_tokens + len(committed))
            if not is_accepted or self.is_over:
                break
        self.token_ids.extend(committed)
        return committed, num_accepted
