"""Cache the texts of tokens: log-probabilities name tokens that the output does not have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from specdec.gateway.upstream.caller import CallerStub
from specdec.v1 import coordinator_pb2 as api

_MOST_PER_CALL = 1024
_MOST_TOKENS = 512 * 1024
"""Tokens kept, of all tokenizers: some 80 MB. The tokenizer that was asked for least lately is dropped first."""
_MOST_TOKENIZERS = 64
_MOST_TOKEN_BYTES = 1024
"""Bytes kept of a token's text, at most; the longest in use have an eighth."""


@dataclass(slots=True)
class _Known:
    texts: dict[int, bytes] = field(default_factory=dict)
    special: set[int] = field(default_factory=set)


class Vocabulary:
    """The texts of tokens, by the digest of their tokenizer."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def learn(self, caller: CallerStub, digest: str, token_ids: Iterable[int]) -> TokenTexts:
        """Fetch the texts of missing tokens; returns all known ones of the tokenizer. Raises SpecdecError."""
        known = self._known.setdefault(digest, _Known())
        self._known.move_to_end(digest)
        while self._is_full():
            self._known.popitem(last=False)
        missing = sorted({token_id for token_id in token_ids if token_id not in known.texts})
        for start in range(0, len(missing), _MOST_PER_CALL):
            wanted = missing[start : start + _MOST_PER_CALL]
            answer = await caller.call("Detokenize", api.DetokenizeRequest(token_ids=wanted, with_tokens=True))
            known.texts.update(zip(wanted, (text[:_MOST_TOKEN_BYTES] for text in answer.tokens), strict=False))
            known.special.update(set(wanted).intersection(answer.special_token_ids))
        return TokenTexts(known.texts, known.special)

    def _is_full(self) -> bool:
        num_tokens = sum(len(known.texts) for known in self._known.values())
        return num_tokens > _MOST_TOKENS or len(self._known) > _MOST_TOKENIZERS


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
