"""Where the next token's text begins in a text, in characters."""

from __future__ import annotations

import codecs

from specdec.gateway.upstream.vocabulary import TokenTexts

_CONTINUATION_BYTES = range(0x80, 0xC0)


class TextPlace:
    """Counts characters token by token. Tokens that share a character begin where it does."""

    def __init__(self, texts: TokenTexts, *, hides_special: bool) -> None:
        """Begin at 0. `hides_special`: the text leaves special tokens out."""
        self._texts = texts
        self._hides_special = hides_special
        self.begin(0)

    def begin(self, place: int) -> None:
        """Go to a place where no character is open."""
        self._place = place
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, token_id: int) -> int:
        """Pass a token; returns its place."""
        if self._hides_special and self._texts.is_special(token_id):
            return self._place
        text = self._completed(token_id)
        start = self._place
        self._place += len(text)
        return start

    def advance_in(self, token_id: int, whole: str) -> int:
        """Pass a token of a known text, which may lack special tokens, its first token, or only the space of that."""
        text = self._completed(token_id)
        start = self._place
        if not whole.startswith(text, start):
            bare = text.lstrip()
            if start == 0 and bare and whole.startswith(bare):
                text = bare
            elif start == 0 or self._texts.is_special(token_id):
                text = ""
        self._place = min(start + len(text), len(whole))
        return start

    def _completed(self, token_id: int) -> str:
        """The characters that a token completes. One that it cannot continue ends before it."""
        data = self._texts.utf8(token_id)
        if data and data[0] not in _CONTINUATION_BYTES:
            self._place += len(self._decoder.decode(b"", True))
        return self._decoder.decode(data)
