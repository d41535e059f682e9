"""The values that sampling parameters may have, the same at coordinators and at replicas.

Within these, finite logits give finite scores, whatever float32 or half precision they come from, up to saturation at
the largest float32 (`specdec.engine.sampling.logit_processors`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 16384
"""Token ids of a request: each row of each step looks them up."""
MAX_BAD_WORDS = 256
"""Texts of a request; each becomes at most two token sequences, with and without a space before it."""
MAX_BAD_WORD_BYTES = 256
MAX_BAD_WORD_TOKENS = 64
MAX_CACHE_SALT_BYTES = 128
MAX_LOGPROBS = 256
"""Alternatives per position: log-probabilities of one position fit into any message (3.4 KB), and a step that computes
them for a whole chunk of a prompt ends."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; `open_low` leaves `low` itself out."""

    low: float
    high: float
    open_low: bool = False

    def fault_of(self, value: float) -> str | None:
        """The fault of a value, for people; None for a value inside."""
        if not math.isfinite(value):
            return "must be a finite number"
        if value < self.low or value > self.high or (self.open_low and value == self.low):
            return f"{value} is outside {self}"
        return None

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        # 0 is greedy. The logit processors raise other values below their MIN_TEMPERATURE to it.
        "temperature": Range(0.0, 100.0),
        "top_p": Range(0.0, 1.0, open_low=True),
        "min_p": Range(0.0, 1.0),
        # Below 0.01 quotients leave float32's range; the output is nothing but repetitions long before.
        "repetition_penalty": Range(0.01, 10.0),
        "presence_penalty": Range(-2.0, 2.0),
        "frequency_penalty": Range(-2.0, 2.0),
    }
)
"""Ranges by the name of the field in `SamplingParams` and `TokenSampling`."""
LOGIT_BIAS = Range(-100.0, 100.0)


def leaves_no_token(
    vocab_size: int, min_tokens: int, held_back: Iterable[int], allowed_token_ids: Collection[int] = ()
) -> bool:
    """Whether `min_tokens` holds back every token that may be sampled.

    Args:
        vocab_size: ids below it exist.
        min_tokens: of the choice.
        held_back: token ids that end a choice.
        allowed_token_ids: the only tokens that may be sampled; empty: all tokens.
    """
    if min_tokens == 0:
        return False
    ends = {token_id for token_id in held_back if token_id < vocab_size}
    return ends.issuperset(allowed_token_ids) if allowed_token_ids else len(ends) >= vocab_size
