"""Counts of a session's committed tokens, for penalties and bad words."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.wire.sampling_limits import MAX_BAD_WORD_TOKENS

_MIN_SLOTS = 64


class TokenCounts(NamedTuple):
    """Distinct tokens of a context. The arrays have one length and are shared with the history: read only."""

    token_ids: NDArray[np.int64]
    seen: NDArray[np.bool_]
    """Whether the token is in prompt or output."""
    num_output: NDArray[np.int64]
    """Occurrences in the output."""


class TokenHistory:
    """Counts of the committed tokens of one session.

    Cost: O(1) per appended token, about 0.1 us per prompt token. `counts` is O(1) without extra tokens, else O(distinct
    tokens). `tail` is O(1).
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        tokens = np.fromiter(prompt_ids, dtype=np.int64)
        distinct, counts = np.unique(tokens, return_counts=True)
        size = len(distinct)
        self._num_tokens = len(tokens)
        self._tail: tuple[int, ...] = ()
        self._slots: dict[int, int] = dict(zip(distinct.tolist(), range(size), strict=True))
        self._token_ids = np.empty(max(size, _MIN_SLOTS), dtype=np.int64)
        self._num_total = np.zeros(max(size, _MIN_SLOTS), dtype=np.int64)
        self._num_output = np.zeros(max(size, _MIN_SLOTS), dtype=np.int64)
        self._token_ids[:size], self._num_total[:size] = distinct, counts

    def __len__(self) -> int:
        """Number of committed tokens, with the prompt."""
        return self._num_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Add committed output tokens."""
        for token_id in token_ids:
            slot = self._slot(token_id)  # may replace the arrays
            self._num_total[slot] += 1
            self._num_output[slot] += 1
        self._num_tokens += len(token_ids)
        self._tail = self.tail(token_ids)

    def tail(self, extra_tokens: Sequence[int] = ()) -> tuple[int, ...]:
        """The last tokens of the committed output and `extra_tokens`, as many as a bad word may have before its last
        one.
        """
        return (*self._tail, *extra_tokens[1 - MAX_BAD_WORD_TOKENS :])[1 - MAX_BAD_WORD_TOKENS :]

    def counts(self, extra_tokens: Sequence[int] = ()) -> TokenCounts:
        """Counts of the committed tokens followed by `extra_tokens` of output."""
        size = len(self._slots)
        token_ids, num_total, num_output = (
            self._token_ids[:size],
            self._num_total[:size],
            self._num_output[:size],
        )
        if extra_tokens:
            new_ids = [token_id for token_id in dict.fromkeys(extra_tokens) if token_id not in self._slots]
            slots = {token_id: size + i for i, token_id in enumerate(new_ids)}
            token_ids = np.append(token_ids, np.array(new_ids, dtype=np.int64))
            num_total = np.append(num_total, np.zeros(len(new_ids), dtype=np.int64))
            num_output = np.append(num_output, np.zeros(len(new_ids), dtype=np.int64))
            for token_id in extra_tokens:
                slot = slots[token_id] if token_id in slots else self._slots[token_id]
                num_total[slot] += 1
                num_output[slot] += 1
        return TokenCounts(token_ids, num_total > 0, num_output)

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._token_ids):
                self._token_ids, self._num_total, self._num_output = (
                    np.concatenate([array, np.zeros_like(array)])
                    for array in (self._token_ids, self._num_total, self._num_output)
                )
            self._slots[token_id] = slot
            self._token_ids[slot] = token_id
        return slot
