"""A tokenizer's tokens as the bytes that they stand for, and bytes as its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer
from tokenizers import Tokenizer


class TokenizerRefused(Exception):
    """No use can be made of a tokenizer; the text is for people."""


class TokenBytes:
    """The tokens of one tokenizer.

    Guarantee: `bytes_of` is what a token adds to a text wherever it stands, half characters included, so that the
    bytes of tokens joined are the bytes of the text.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Read the content of a tokenizer.json. Raises TokenizerRefused for what is none, or none that is known."""
        if not tokenizer_json.lstrip().startswith("{"):  # else it would be taken for a path
            raise TokenizerRefused("there is no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(tokenizer_json)
            self._bytes = LLTokenizer(tokenizer_json)
            before = tokenizer.encode("").ids
        except BaseException as error:
            # What panics in Rust is no Exception, and says nothing of this process.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TokenizerRefused(f"the tokenizer cannot be read: {type(error).__name__}: {error}") from error
        self.ids: tuple[int, ...] = tuple(sorted(tokenizer.get_vocab(with_added_tokens=True).values()))
        """All ids that stand for something."""
        self.special: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        """Ids that are no text, each with its name."""
        self.before: tuple[int, ...] = tuple(before)
        """What it puts before every text."""

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for; of a special one its name."""
        name = self.special.get(token_id)
        return bytes(self._bytes.decode_bytes([token_id])) if name is None else name.encode()

    def encode(self, data: bytes) -> list[tuple[int, bytes]]:
        """The tokens of a text, each with what it stands for, which joined are `data`.

        Half characters become tokens of single bytes. Where the tokenizer changes texts before it writes them (to
        lower case, say), its first token stands for all of `data`. Nothing is put before the text.
        """
        token_ids: Sequence[int] = self._bytes.tokenize_bytes(data)
        spans = [bytes(self._bytes.decode_bytes([token_id])) for token_id in token_ids]
        if b"".join(spans) != data:
            spans = [data, *([b""] * len(spans))][: len(spans)]
        return list(zip(token_ids, spans, strict=True))

    def settled(self, data: bytes) -> tuple[list[int], bytes]:
        """The tokens of a text as far as what follows it is not likely to change them, and the bytes after them."""
        token_ids, rest = self._bytes.tokenize_partial(data)
        return list(token_ids), bytes(rest)


def split_half_character(data: bytes) -> tuple[bytes, bytes]:
    """A text, and the bytes at its end that are the beginning of a character."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue  # goes on a character: look further back for its beginning
        wanted = 2 if lead & 0xE0 == 0xC0 else 3 if lead & 0xF0 == 0xE0 else 4 if lead & 0xF8 == 0xF0 else 1
        return (data[:-length], data[-length:]) if wanted > length else (data, b"")
    return data, b""
