"""Bad words as sequences of tokens, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.wire.errors import InvalidRequest
from specdec.wire.sampling_limits import MAX_BAD_WORD_BYTES, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

_FIELD = "sampling.bad_words"


def check_bad_words(words: Sequence[str]) -> None:
    """Raise InvalidRequest if there are too many, or one is blank or too long."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(_FIELD, f"{len(words)} words exceed the limit of {MAX_BAD_WORDS}")
    for index, word in enumerate(words):
        if not word.strip():
            raise InvalidRequest(f"{_FIELD}[{index}]", "must not be blank")
        if len(word.encode()) > MAX_BAD_WORD_BYTES:
            raise InvalidRequest(f"{_FIELD}[{index}]", f"must be at most {MAX_BAD_WORD_BYTES} bytes")


def bad_word_sequences(words: Sequence[str], encode: Callable[[str], list[int]], vocab_size: int) -> list[list[int]]:
    """The token sequences of checked words: each without leading white space, and with one leading space.

    The sequence with a space counts only if the space is part of its first token, as within a text; otherwise the
    first sequence also matches after a space token.

    Args:
        words: a request's bad words.
        encode: returns a text's token ids, without special tokens.
        vocab_size: the model's, which may be smaller than its tokenizer's.

    Raises:
        InvalidRequest: a word has too many tokens.
    """
    sequences: list[list[int]] = []
    for index, word in enumerate(words):
        bare, spaced = encode(word.lstrip()), encode(" " + word.lstrip())
        if len(bare) > MAX_BAD_WORD_TOKENS:
            message = f"{len(bare)} tokens exceed the limit of {MAX_BAD_WORD_TOKENS}"
            raise InvalidRequest(f"{_FIELD}[{index}]", message)
        found = [bare]
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            found.append(spaced)
        sequences += [ids for ids in found if ids and max(ids) < vocab_size and ids not in sequences]
    return sequences
