"""Cache the texts of tokens: log-probabilities name tokens that the output does not have."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from specdec.gateway.upstream.caller import CallerStub
from specdec.v1 import coordinator_pb2 as api

_MOST_PER_CALL = 1024
_MOST_TOKENS = 2 * 1024 * 1024
"""Tokens kept, of all tokenizers; more are of models no longer served, and all are dropped."""


@dataclass(slots=True)
class _Known:
    texts: dict[int, bytes] = field(default_factory=dict)
    special: set[int] = field(default_factory=set)


class Vocabulary:
    """The texts of tokens, by the digest of their tokenizer."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    async def learn(self, caller: CallerStub, digest: str, token_ids: Iterable[int]) -> TokenTexts:
        """Fetch the texts of missing tokens; returns all known ones of the tokenizer. Raises SpecdecError."""
        if sum(len(known.texts) for known in self._known.values()) > _MOST_TOKENS:
            self._known = {}
        known = self._known.setdefault(digest, _Known())
        missing = sorted({token_id for token_id in token_ids if token_id not in known.texts})
        for start in range(0, len(missing), _MOST_PER_CALL):
            wanted = missing[start : start + _MOST_PER_CALL]
            answer = await caller.call("Detokenize", api.DetokenizeRequest(token_ids=wanted, with_tokens=True))
            known.texts.update(zip(wanted, answer.tokens, strict=False))
            known.special.update(answer.special_token_ids)
        return TokenTexts(known.texts, known.special)


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
