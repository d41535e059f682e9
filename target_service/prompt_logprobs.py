"""Log-probabilities of a session's prompt: computed chunk by chunk, sent in parts, kept until acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from specdec.target_service.logprobs import prompt_logprobs
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import position_bytes

_PART_OVERHEAD_BYTES = 64
"""Bytes of a part besides its positions."""


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
