"""A session of a target behind an endpoint: its tokens and its draft's last proposal."""

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
    """Position below which tokens may be committed."""
    chain: tuple[int, list[int]] = (0, [])
    """Start position of the last proposal, and the tokens of its main path."""
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None
    due_at_s: float = 0.0
    """Time of time.monotonic until which the next call waits, for a draft or after a failure."""
    num_failures: int = 0
    """Number of consecutive failed calls."""
    told_at_s: float = 0.0
    """Time of the last verdict or progress message."""

    @property
    def num_tokens(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def is_over(self) -> bool:
        """Whether its last token is committed."""
        return self.finish_reason != pb.FINISH_REASON_UNSPECIFIED

    def propose(self, encoded: bytes) -> None:
        """Keep the main path of a proposal: the first children, from the root down.

        Raises ValueError: the message does not parse, is too large, or is no tree.
        """
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
        """Tokens of the last proposal's main path after the committed ones, within credit and limits; empty if they
        differ."""
        start, path = self.chain
        known = self.token_ids[start:]
        if start > self.num_tokens or path[: len(known)] != known:
            return []
        most = min(
            self.max_draft_tokens, self.end.max_depth(self.num_tokens), self.credit_position - self.num_tokens - 1
        )
        return path[len(known) :][: max(0, most)]

    def commit(self, tokens: list[int], drafted: list[int]) -> tuple[list[int], int]:
        """Commit the target's `tokens`: one after the committed tokens, and one after each drafted token.

        Returns the committed tokens, up to the choice's end, and the number of accepted draft tokens among them.
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
