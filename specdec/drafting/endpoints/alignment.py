"""Converts between an endpoint's text and the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_LOOK_BACK = 16
"""Committed tokens that are tokenized again with new text, since tokens may merge at the boundary."""
_MOST_UNSTABLE = 4
"""Tokens of the last, possibly unfinished word that later text may change."""
_MOST_CHARS_PER_TOKEN = 16
"""Characters that are tokenized per wanted token."""
_HALF_CHARACTER = "\ufffd"


class TargetText:
    """The target's tokenizer, to compare tokens with an endpoint's text."""

    def __init__(self, tokenizer_json: str) -> None:
        """Raises ValueError if the JSON is no tokenizer."""
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:
            raise ValueError(f"the target's tokenizer cannot be read: {type(error).__name__}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # The endpoint adds the tokens that its tokenizer puts before every text.
        self._before = list(self._tokenizer.encode("").ids)

    def prompt(self, token_ids: Sequence[int]) -> str | None:
        """The tokens' text, with special tokens written out; None if it ends inside a character."""
        ids = list(token_ids)
        if self._before and ids[: len(self._before)] == self._before:
            ids = ids[len(self._before) :]
        text = self._decode(ids)
        return None if text.endswith(_HALF_CHARACTER) else text

    def since(self, token_ids: Sequence[int], start: int) -> str | None:
        """The text of the tokens from `start` on; None if it ends inside a character.

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
        """The tokens of `text` after `token_ids`, without those that later text may change.

        Empty if the last committed token would merge with the text. `is_whole`: no more text will come. Cost: linear in
        `most`.
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
        """Number of tokens that make up `before`; None if a token crosses its end."""
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
