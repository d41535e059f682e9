"""A searchable store of tokens: finds earlier occurrences of a context, newest first.

Uses hash chains, as LZ77 coders do: each position points to the previous one with the same last tokens. Appending costs
one dict look-up per token (0.3 us); searching is linear in the compared tokens. Memory: about 150 bytes per distinct
pair of tokens, plus 12 per token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

_NOWHERE = -1
SEPARATOR = -1
"""Separates two texts; no match crosses it."""
_MOST_AT_ONCE = 1024
"""Tokens of a prompt that one call appends, in 0.3 ms."""


class Corpus:
    """Texts in one sequence, with the positions of all runs of `key_length` (1 or 2) tokens."""

    def __init__(self, key_length: int) -> None:
        self.key_length = key_length
        self.first = 0
        """Position of the oldest stored token."""
        self._tokens = array("i")
        self._before = array("q")
        """For each position, the previous one with the same key."""
        self._newest: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of stored tokens, with separators."""
        return len(self._tokens)

    @property
    def end(self) -> int:
        """Position behind the newest token."""
        return self.first + len(self._tokens)

    def append(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the newest text."""
        tokens, before, newest = self._tokens, self._before, self._newest
        last = tokens[-1] if tokens else SEPARATOR
        position = self.end
        is_pair = self.key_length == 2
        for token in token_ids:
            if token == SEPARATOR or (is_pair and last == SEPARATOR):
                before.append(_NOWHERE)
            else:
                key = last << 32 | token if is_pair else token
                before.append(newest.get(key, _NOWHERE))
                newest[key] = position
            tokens.append(token)
            last = token
            position += 1

    def follow(self, token_ids: Sequence[int]) -> None:
        """Append the new tokens of the only, growing text; at most `_MOST_AT_ONCE` per call."""
        start = len(self._tokens)
        if start < len(token_ids):
            self.append(islice(token_ids, start, start + _MOST_AT_ONCE))

    def matches(self, context: Sequence[int], most_length: int, most_matches: int) -> list[tuple[int, int]]:
        """Earlier occurrences of the end of `context` that have a next token.

        Returns:
            At most `most_matches` pairs, newest first: the position after the occurrence, and the number of agreeing
            tokens (`key_length` to `most_length`).
        """
        key_length = self.key_length
        if len(context) < key_length:
            return []
        tail = list(context[-most_length:])
        key = tail[-2] << 32 | tail[-1] if key_length == 2 else tail[-1]
        tokens, before, first = self._tokens, self._before, self.first
        position = self._newest.get(key, _NOWHERE)
        last = len(tokens) - 1
        found: list[tuple[int, int]] = []
        while position >= first and len(found) < most_matches:
            index = position - first
            # The oldest pair may have lost its first token.
            if key_length - 1 <= index < last and tokens[index + 1] != SEPARATOR:
                length = key_length
                while length < len(tail) and index >= length and tokens[index - length] == tail[-1 - length]:
                    length += 1
                found.append((position + 1, length))
            position = before[index]
        return found

    def token(self, position: int) -> int:
        """The token at a position; `SEPARATOR` at the end of a text and outside the stored range."""
        index = position - self.first
        return self._tokens[index] if 0 <= index < len(self._tokens) else SEPARATOR

    def drop(self, num_tokens: int) -> None:
        """Forget the oldest tokens. Cost: that of appending them, plus a copy of the rest."""
        num_tokens = min(num_tokens, len(self._tokens))
        tokens, newest = self._tokens, self._newest
        last = SEPARATOR
        for index in range(num_tokens):
            token = tokens[index]
            key = last << 32 | token if self.key_length == 2 else token
            if newest.get(key, _NOWHERE) == self.first + index:
                del newest[key]
            last = token
        # The oldest remaining pair begins with a dropped token.
        if self.key_length == 2 and 0 < num_tokens < len(tokens):
            key = last << 32 | tokens[num_tokens]
            if newest.get(key, _NOWHERE) == self.first + num_tokens:
                del newest[key]
        del self._tokens[:num_tokens]
        del self._before[:num_tokens]
        self.first += num_tokens
