"""Between text and the target's tokens: what was committed since a place as text, and text as tokens after it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_LOOK_BACK = 16
"""Committed tokens that are tokenized again with what follows: a boundary may merge."""
_MOST_UNSTABLE = 4
"""Of the last word, while more may come, so many tokens may still become others."""
_MOST_CHARS_PER_TOKEN = 16
"""Of text that is tokenized for a number of tokens."""
_HALF_CHARACTER = "\ufffd"


class TargetText:
    """The target's tokenizer, for text that is compared with what an endpoint says."""

    def __init__(self, tokenizer_json: str) -> None:
        """Raises ValueError where that is no tokenizer."""
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:
            raise ValueError(f"the target's tokenizer cannot be read: {type(error).__name__}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # What a tokenizer puts before every text the endpoint's own puts there, too.
        self._before = list(self._tokenizer.encode("").ids)

    def prompt(self, token_ids: Sequence[int]) -> str | None:
        """The text of tokens, special ones as they are written; None where it ends within a character."""
        ids = list(token_ids)
        if self._before and ids[: len(self._before)] == self._before:
            ids = ids[len(self._before) :]
        text = self._decode(ids)
        return None if text.endswith(_HALF_CHARACTER) else text

    def since(self, token_ids: Sequence[int], start: int) -> str | None:
        """The text of the tokens from `start` on; None where it ends within a character.

        Cost: linear in these tokens.
        """
        if start == len(token_ids):
            return ""
        from_token = max(0, start - _LOOK_BACK)
        before, whole = self._decode(token_ids[from_token:start]), self._decode(token_ids[from_token:])
        if whole.endswith(_HALF_CHARACTER) or not whole.startswith(before):
            return None
        return whole[len(before) :]

    def tokens_after(self, token_ids: Sequence[int], text: str, most: int, *, is_whole: bool) -> list[int]:
        """The tokens of `text` where it follows `token_ids`, as far as more text could not change them.

        Empty where the last committed token would merge with the text, so that the target writes it otherwise.
        `is_whole`: nothing follows the text. Cost: linear in `most`.
        """
        most_chars = _MOST_CHARS_PER_TOKEN * most
        text, is_whole = text[:most_chars], is_whole and len(text) <= most_chars
        tail = token_ids[-_LOOK_BACK:]
        before = self._decode(tail)
        encoding = self._tokenizer.encode(before + text, add_special_tokens=False)
        ids = encoding.ids
        begin = self._boundary(ids, before, len(self._tokenizer.encode(before, add_special_tokens=False).ids))
        if begin is None:
            return []
        end = len(ids) if is_whole else self._stable_end(encoding.word_ids, begin)
        return ids[begin : min(end, begin + most)]

    def _boundary(self, ids: list[int], before: str, expected: int) -> int | None:
        """How many of the tokens stand for the text before; None where a token spans its end."""
        for place in sorted(
            range(max(0, expected - 2), min(len(ids), expected + 2) + 1), key=lambda i: abs(i - expected)
        ):
            if self._decode(ids[:place]) == before:
                return place
        return None

    @staticmethod
    def _stable_end(word_ids: Sequence[int | None], begin: int) -> int:
        last = len(word_ids)
        word = word_ids[-1] if last else None
        end = last
        while end > begin and last - end < _MOST_UNSTABLE and word_ids[end - 1] == word:
            end -= 1
        return end

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
