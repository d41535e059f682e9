"""Cache the texts of tokens: log-probabilities name tokens that the output does not have."""

from __future__ import annotations

from collections.abc import Iterable, Set

from specdec.gateway.upstream.coordinators import CallerStub
from specdec.v1 import coordinator_pb2 as api

_MOST_PER_CALL = 1024
_MOST_TOKENS = 512 * 1024
"""Tokens kept; vocabularies are smaller, so more are of models no longer served, and all are dropped."""


class Vocabulary:
    """The texts of one tokenizer's tokens. A digest identifies the tokenizer."""

    def __init__(self) -> None:
        self._digest = ""
        self._bytes: dict[int, bytes] = {}
        self._special: set[int] = set()

    async def learn(self, caller: CallerStub, digest: str, token_ids: Iterable[int]) -> TokenTexts:
        """Fetch the texts of missing tokens; returns all known ones. Raises SpecdecError."""
        if digest != self._digest or len(self._bytes) > _MOST_TOKENS:
            self._digest, self._bytes, self._special = digest, {}, set()
        known = self._bytes
        missing = sorted({token_id for token_id in token_ids if token_id not in known})
        for start in range(0, len(missing), _MOST_PER_CALL):
            wanted = missing[start : start + _MOST_PER_CALL]
            answer = await caller.call("Detokenize", api.DetokenizeRequest(token_ids=wanted, with_tokens=True))
            known.update(zip(wanted, answer.tokens, strict=False))
            self._special.update(answer.special_token_ids)
        return TokenTexts(known, self._special)


class TokenTexts:
    """The known texts of tokens."""

    def __init__(self, known: dict[int, bytes], special: Set[int] = frozenset(), *, as_ids: bool = False) -> None:
        """`as_ids`: a token's name is token_id:ID."""
        self._known = known
        self._special = special
        self._as_ids = as_ids

    def named_by_id(self) -> TokenTexts:
        """The same tokens, named token_id:ID."""
        return TokenTexts(self._known, self._special, as_ids=True)

    def name(self, token_id: int) -> str:
        """A token's name in log-probabilities."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """A token's text; parts of characters are U+FFFD. Empty for an unknown token."""
        return self._known.get(token_id, b"").decode("utf-8", "replace")

    def utf8(self, token_id: int) -> bytes:
        """A token's bytes."""
        return self._known.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        """Whether a token is one that texts may leave out."""
        return token_id in self._special
