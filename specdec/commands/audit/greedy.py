"""Comparison of greedy output with the reference: every token must be its best one, or a near-tie.

The reference reads the service's own tokens, so tokens after a near-tie are checked too. If each is its best token, its
own greedy decoding gives the same text, by induction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

NEAR_TIES = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
"""By dtype: difference of two logits below which another order of sums may swap the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBestToken:
    """A token that is not the reference's best one."""

    prompt: int
    position: int
    """Index in the output, from 0."""
    token_id: int
    best_token_id: int
    gap: float
    """Difference of the reference's logits of the two tokens."""


@dataclass(slots=True, kw_only=True)
class GreedyFinding:
    """Counts and differences over all prompts."""

    tolerance: float
    """Gap below which a difference is a near-tie."""
    num_tokens: int = 0
    num_equal: int = 0
    near_ties: list[NotBestToken] = field(default_factory=list)
    faults: list[NotBestToken] = field(default_factory=list)
    """Differences that rounding does not explain."""

    def check(self, prompt: int, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Check one output. `logits` [N, V] are the reference's, one row per token."""
        best = logits.argmax(dim=1)
        tokens = torch.tensor(list(token_ids), dtype=torch.int64)
        gaps = logits.gather(1, best[:, None])[:, 0] - logits.gather(1, tokens[:, None])[:, 0]
        self.num_tokens += len(token_ids)
        for position, (token, other, gap) in enumerate(zip(token_ids, best.tolist(), gaps.tolist(), strict=True)):
            if token == other or gap == 0.0:
                self.num_equal += 1
                continue
            found = NotBestToken(prompt=prompt, position=position, token_id=token, best_token_id=other, gap=gap)
            (self.near_ties if gap < self.tolerance else self.faults).append(found)
