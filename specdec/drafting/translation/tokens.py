"""Converts a tokenizer's tokens to bytes and back."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer
from tokenizers import Tokenizer


class TokenizerRefused(Exception):
    """A tokenizer that cannot be used; the message is for operators."""


class TokenBytes:
    """The tokens of one tokenizer.

    Guarantee: `bytes_of` gives the bytes that a token adds to any text, even parts of characters. So the joined bytes
    of tokens are those of their text.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Read the content of a tokenizer.json. Raises TokenizerRefused if it is invalid or not supported."""
        if not tokenizer_json.lstrip().startswith("{"):  # else it would be taken for a path
            raise TokenizerRefused("the model has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(tokenizer_json)
            self._bytes = LLTokenizer(tokenizer_json)
            before = tokenizer.encode("").ids
        except BaseException as error:
            # A panic in Rust is no Exception, but harmless to this process.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TokenizerRefused(f"the tokenizer cannot be read: {type(error).__name__}: {error}") from error
        self.ids: tuple[int, ...] = tuple(sorted(tokenizer.get_vocab(with_added_tokens=True).values()))
        """All ids that are tokens."""
        self.special: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        """Names of special tokens by id."""
        self.before: tuple[int, ...] = tuple(before)
        """Tokens that it puts before every text."""

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes; a special token's name."""
        name = self.special.get(token_id)
        return bytes(self._bytes.decode_bytes([token_id])) if name is None else name.encode()

    def encode(self, data: bytes) -> list[tuple[int, bytes]]:
        """The tokens of a text, each with its bytes, which joined are `data`.

        Parts of characters become tokens of single bytes. If the tokenizer changes texts first (to lower case, say),
        the first token gets all of `data`. No tokens are put before the text.
        """
        token_ids: Sequence[int] = self._bytes.tokenize_bytes(data)
        spans = [bytes(self._bytes.decode_bytes([token_id])) for token_id in token_ids]
        if b"".join(spans) != data:
            spans = [data, *([b""] * len(spans))][: len(spans)]
        return list(zip(token_ids, spans, strict=True))

    def settled(self, data: bytes) -> tuple[list[int], bytes]:
        """The text's tokens that later text is unlikely to change, and the bytes after them."""
        token_ids, rest = self._bytes.tokenize_partial(data)
        return list(token_ids), bytes(rest)


def split_half_character(data: bytes) -> tuple[bytes, bytes]:
    """A text without an incomplete last character, and that character's bytes."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue  # inside a character: its first byte is further back
        wanted = 2 if lead & 0xE0 == 0xC0 else 3 if lead & 0xF0 == 0xE0 else 4 if lead & 0xF8 == 0xF0 else 1
        return (data[:-length], data[-length:]) if wanted > length else (data, b"")
    return data, b""
