"""Bad words as sequences of tokens, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.wire.errors import InvalidRequest
from specdec.wire.sampling_limits import MAX_BAD_WORD_BYTES, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

_FIELD = "sampling.bad_words"


def check_bad_words(words: Sequence[str]) -> None:
    """Raises InvalidRequest where there are too many, or one is empty or too long."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(_FIELD, f"{len(words)} words are more than the limit of {MAX_BAD_WORDS}")
    for index, word in enumerate(words):
        if not word.strip():
            raise InvalidRequest(f"{_FIELD}[{index}]", "must have a character that is no white space")
        if len(word.encode()) > MAX_BAD_WORD_BYTES:
            raise InvalidRequest(f"{_FIELD}[{index}]", f"must be at most {MAX_BAD_WORD_BYTES} bytes")


def bad_word_sequences(words: Sequence[str], encode: Callable[[str], list[int]], vocab_size: int) -> list[list[int]]:
    """The sequences of tokens that checked words are: each without white space before it, and with one space.

    That with a space counts only where the space is part of another first token, as it is within a text; where it is a
    token of its own the first sequence is found behind it anyway.

    Args:
        words: of a request.
        encode: token ids of a text, without special tokens.
        vocab_size: of the model, which may have fewer tokens than its tokenizer.

    Raises:
        InvalidRequest: a word is too many tokens.
    """
    sequences: list[list[int]] = []
    for index, word in enumerate(words):
        bare, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        if len(bare) > MAX_BAD_WORD_TOKENS:
            message = f"{len(bare)} tokens are more than the limit of {MAX_BAD_WORD_TOKENS}"
            raise InvalidRequest(f"{_FIELD}[{index}]", message)
        found = [bare]
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            found.append(spaced)
        sequences += [ids for ids in found if ids and max(ids) < vocab_size and ids not in sequences]
    return sequences
