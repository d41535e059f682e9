"""The texts of tokens, asked for once: log-probabilities name tokens that the output does not have."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.gateway.upstream.coordinators import Caller
from specdec.v1 import coordinator_pb2 as api

_MOST_PER_CALL = 1024
_MOST_TOKENS = 512 * 1024
"""Vocabularies are smaller. Above, all are forgotten: tokens of models that are not served any more."""


class Vocabulary:
    """What tokens of one tokenizer stand for. Tokenizers are told apart by their digest."""

    def __init__(self) -> None:
        self._digest = ""
        self._bytes: dict[int, bytes] = {}

    async def learn(self, caller: Caller, digest: str, token_ids: Iterable[int]) -> TokenTexts:
        """The texts of at least these tokens. Raises SpecdecError."""
        if digest != self._digest or len(self._bytes) > _MOST_TOKENS:
            self._digest, self._bytes = digest, {}
        known = self._bytes
        missing = sorted({token_id for token_id in token_ids if token_id not in known})
        for start in range(0, len(missing), _MOST_PER_CALL):
            wanted = missing[start : start + _MOST_PER_CALL]
            answer = await caller.call("Detokenize", api.DetokenizeRequest(token_ids=wanted, with_tokens=True))
            known.update(zip(wanted, answer.tokens, strict=False))
        return TokenTexts(known)


class TokenTexts:
    """The texts of tokens that are known."""

    def __init__(self, known: dict[int, bytes], *, as_ids: bool = False) -> None:
        """With `as_ids` a token's name is token_id:ID."""
        self._known = known
        self._as_ids = as_ids

    def named_by_id(self) -> TokenTexts:
        """The same tokens, of which each is called token_id:ID."""
        return TokenTexts(self._known, as_ids=True)

    def name(self, token_id: int) -> str:
        """What log-probabilities call it."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Its text; parts of characters are U+FFFD. Empty for a token that is not known."""
        return self._known.get(token_id, b"").decode("utf-8", "replace")

    def utf8(self, token_id: int) -> list[int]:
        """Its bytes."""
        return list(self._known.get(token_id, b""))
