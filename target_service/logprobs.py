"""Raw log-probabilities as messages: those of a prompt are computed chunk by chunk, and kept until acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from specdec.engine.errors import NonFiniteLogits
from specdec.engine.sampling.sampler import TokenLogprobs
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import position_bytes

LEAST_LOGPROB = -9999.0
"""Value reported in place of minus infinity."""
_MOST_SLICE_NUMBERS = 2**23
"""Number of logits converted at once: 64 MiB in double precision, for any vocabulary and length of a chunk."""
_PART_OVERHEAD_BYTES = 64
"""Bytes of a part besides its positions."""


def position_logprobs(entry: TokenLogprobs | None) -> pb.PositionLogprobs:
    """One position's log-probabilities as a message; None: an empty one."""
    if entry is None:
        return pb.PositionLogprobs()
    top = [pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.PositionLogprobs(logprob=entry.logprob, top=top)


def prompt_logprobs(
    logits: torch.Tensor, next_token_ids: list[int], num_top: int, vocab_size: int
) -> list[pb.PositionLogprobs]:
    """Log-probabilities of prompt tokens given the logits before them.

    Args:
        logits: [N, V] float32, rows of consecutive prompt tokens.
        next_token_ids: [N], the prompt token after each row.
        num_top: number of likeliest tokens to report at each position.
        vocab_size: number of token ids; columns from here on are padding.

    Raises:
        NonFiniteLogits: a row holds NaN or plus infinity, or nothing above minus infinity.
    """
    most_rows = max(1, _MOST_SLICE_NUMBERS // vocab_size)
    return [
        position
        for start in range(0, len(next_token_ids), most_rows)
        for position in _slice_logprobs(logits[start:], next_token_ids[start : start + most_rows], num_top, vocab_size)
    ]


def node_logprobs(logits: torch.Tensor, token_ids: list[int], vocab_size: int) -> list[float]:
    """Log-probability of each token in its own row, at least `LEAST_LOGPROB`; that also where it is not finite.

    Args:
        logits: [N, V] float32; rows off the walked path may hold NaN.
        token_ids: [N], the token of each row.
        vocab_size: number of token ids; columns from here on are padding.
    """
    raw = torch.log_softmax(logits[:, :vocab_size].to(torch.float64), dim=-1)
    chosen = raw.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1)
    least = LEAST_LOGPROB
    return torch.nan_to_num(chosen, nan=least, posinf=least, neginf=least).clamp(min=least).tolist()


def _slice_logprobs(
    logits: torch.Tensor, next_token_ids: list[int], num_top: int, vocab_size: int
) -> list[pb.PositionLogprobs]:
    raw = logits[: len(next_token_ids), :vocab_size].to(torch.float64)
    if not bool(raw.amax(dim=-1).isfinite().all()):
        raise NonFiniteLogits
    logprobs = torch.log_softmax(raw, dim=-1)
    num_top = min(num_top, vocab_size)
    chosen = logprobs.gather(1, torch.tensor(next_token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    values, ids = (t.tolist() for t in logprobs.topk(num_top, dim=-1)) if num_top else ([], [])
    return [
        pb.PositionLogprobs(
            logprob=logprob,
            top=[pb.TokenLogprob(token_id=i, logprob=v) for i, v in zip(ids[row], values[row], strict=True)]
            if num_top
            else [],
        )
        for row, logprob in enumerate(chosen)
    ]


class PromptLogprobs:
    """Progress of a prompt's log-probabilities: computed, sent and acknowledged. A position is that of the described
    token.

    Invariant: at most one step's rows are computed past the credit, so the kept parts are bounded by credit and step.
    """

    def __init__(self, body: pb.OpenSession, vocab_size: int, piece_bytes: int) -> None:
        """Begin at the position that the session's opening asks for.

        Args:
            body: the OpenSession.
            vocab_size: number of token ids; columns of logits from here on are padding.
            piece_bytes: most bytes of a part.
        """
        self.next_position = max(1, body.prompt_logprobs_start)
        """First position that is not computed; the prompt's first token has no log-probability."""
        self._end = body.num_prompt_tokens
        self._token_ids = body.token_ids
        self._vocab_size = vocab_size
        self._num_top = body.num_prompt_logprobs
        self._credit = body.prompt_logprobs_credit if body.HasField("prompt_logprobs_credit") else None
        self._most_positions = max(1, (piece_bytes - _PART_OVERHEAD_BYTES) // position_bytes(self._num_top))
        self._unacknowledged: deque[pb.PromptLogprobsPart] = deque()
        self._whole: list[pb.PositionLogprobs] = []

    @property
    def is_complete(self) -> bool:
        """Whether all positions are computed."""
        return self.next_position >= self._end

    @property
    def is_starved(self) -> bool:
        """Whether the next position needs more credit."""
        return self._credit is not None and not self.is_complete and self.next_position >= self._credit

    def take(self, logits: torch.Tensor, start: int) -> list[pb.PromptLogprobsPart]:
        """Compute the log-probabilities of a chunk of prefill.

        Returns the parts to send: none where the owner wants all positions with the first verdict.

        Args:
            logits: [N, V] float32, rows of the chunk.
            start: position of the chunk's first token; after a preemption chunks are computed again.

        Raises:
            NonFiniteLogits: as in `logprobs.prompt_logprobs`.
            ValueError: the chunk begins past the next position.
        """
        num_known = self.next_position - 1 - start
        if num_known < 0:
            raise ValueError(f"rows from token {start} on say nothing of position {self.next_position}")
        new = logits[num_known:]
        following = list(self._token_ids[self.next_position : self._end][: len(new)])
        if not following:
            return []
        positions = prompt_logprobs(new, following, self._num_top, self._vocab_size)
        first, self.next_position = self.next_position, self.next_position + len(positions)
        if self._credit is None:
            self._whole += positions
            return []
        parts = [
            pb.PromptLogprobsPart(
                start_position=first + index, positions=positions[index : index + self._most_positions]
            )
            for index in range(0, len(positions), self._most_positions)
        ]
        self._unacknowledged += parts
        return parts

    def take_whole(self) -> list[pb.PositionLogprobs]:
        """All positions, once, for an owner that wants them with the first verdict; else none."""
        whole, self._whole = self._whole, []
        return whole

    def credited(self, credit: pb.Credit) -> None:
        """Raise the credit, and drop the parts that the owner acknowledges."""
        if self._credit is not None:
            self._credit = max(self._credit, credit.prompt_logprobs_position)
        while self._unacknowledged and _end_of(self._unacknowledged[0]) <= credit.acknowledged_prompt_logprobs_position:
            self._unacknowledged.popleft()

    def unseen(self, position: int) -> Iterator[pb.PromptLogprobsPart]:
        """Kept parts that end past `position`, in order."""
        return (part for part in self._unacknowledged if _end_of(part) > position)


def _end_of(part: pb.PromptLogprobsPart) -> int:
    return part.start_position + len(part.positions)
