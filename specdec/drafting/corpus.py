"""Tokens that can be searched for earlier occurrences of a context, newest first.

Kept as hash chains, as LZ77 coders keep their window: each position knows the one before it with the same last tokens.
Appending a token costs a look-up in a dict (0.3 us), searching costs what is compared, and the oldest tokens can be
dropped. Memory: some 150 bytes for each distinct pair of tokens, 8 for each token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

_NOWHERE = -1
SEPARATOR = -1
"""Between two texts: no match goes past it."""
_MOST_AT_ONCE = 1024
"""Tokens of a prompt that are taken in by one call: 0.3 ms."""


class Corpus:
    """Texts, one behind the other, with the positions of all runs of `key_length` (1 or 2) tokens."""

    def __init__(self, key_length: int) -> None:
        self.key_length = key_length
        self.first = 0
        """Position of the oldest token that is kept."""
        self._tokens = array("i")
        self._before = array("q")
        """Of each position the one before it with the same key."""
        self._newest: dict[int, int] = {}

    def __len__(self) -> int:
        """Tokens that are kept, separators included."""
        return len(self._tokens)

    @property
    def end(self) -> int:
        """Position behind the newest token."""
        return self.first + len(self._tokens)

    def append(self, token_ids: Iterable[int]) -> None:
        """Go on with the newest text."""
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
        """Take in what is new of a text that only grows, and is all there is; of much that is new, the next part."""
        start = len(self._tokens)
        if start < len(token_ids):
            self.append(islice(token_ids, start, start + _MOST_AT_ONCE))

    def matches(self, context: Sequence[int], most_length: int, most_matches: int) -> list[tuple[int, int]]:
        """Where the end of `context` occurred, with something behind it.

        Returns:
            Pairs of the position behind the occurrence and the number of tokens that agree, at least `key_length` and
            at most `most_length`; newest first, no more than `most_matches`.
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
            # Of the first pair that is left one token may be gone.
            if key_length - 1 <= index < last and tokens[index + 1] != SEPARATOR:
                length = key_length
                while length < len(tail) and index >= length and tokens[index - length] == tail[-1 - length]:
                    length += 1
                found.append((position + 1, length))
            position = before[index]
        return found

    def token(self, position: int) -> int:
        """The token there; `SEPARATOR` at the end of a text and past all of them."""
        index = position - self.first
        return self._tokens[index] if 0 <= index < len(self._tokens) else SEPARATOR

    def drop(self, num_tokens: int) -> None:
        """Forget the oldest tokens. Cost: as of appending them, and a copy of the rest."""
        num_tokens = min(num_tokens, len(self._tokens))
        tokens, newest = self._tokens, self._newest
        last = SEPARATOR
        for index in range(num_tokens):
            token = tokens[index]
            key = last << 32 | token if self.key_length == 2 else token
            if newest.get(key, _NOWHERE) == self.first + index:
                del newest[key]
            last = token
        # The first pair that is left begins with a token that is gone.
        if self.key_length == 2 and 0 < num_tokens < len(tokens):
            key = last << 32 | tokens[num_tokens]
            if newest.get(key, _NOWHERE) == self.first + num_tokens:
                del newest[key]
        del self._tokens[:num_tokens]
        del self._before[:num_tokens]
        self.first += num_tokens
