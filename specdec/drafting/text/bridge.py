"""Converts between a target's tokens and those of a draft with another tokenizer, through their text.

A piece is a token's joint id (`specdec.drafting.translation.shared`) and its bytes. A sequence's pieces joined are the
text of its committed tokens, with special tokens as the target writes them. Tokens that a tokenizer puts before every
text have no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.drafting.translation.shared import SharedVocabulary
from specdec.drafting.translation.tokens import TokenBytes, split_half_character

LOOK_BACK = 8
"""Tokens before a boundary that are tokenized again with the text after it, as they may merge."""
Piece = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Written:
    """Drafted text as the target's tokens."""

    token_ids: tuple[int, ...]
    """All tokens; the last ones may change when more is drafted."""
    ends: tuple[int, ...]
    """For each token, the bytes of drafted text up to its end."""
    num_settled: int
    """Number of tokens that are unlikely to change."""


NOTHING_WRITTEN = Written((), (), 0)


class TextBridge:
    """Converts each side's tokens to the other's. Cost of a call: linear in the text."""

    def __init__(self, target: TokenBytes, draft: TokenBytes, vocabulary: SharedVocabulary) -> None:
        self._target = target
        self._draft = draft
        self._vocabulary = vocabulary
        self._spans: dict[int, bytes] = {}

    def piece(self, joint_id: int) -> Piece:
        """A token of the draft as a piece."""
        span = self._spans.get(joint_id)
        if span is None:
            if joint_id < self._vocabulary.num_target:
                span = self._target.bytes_of(joint_id)
            else:
                span = self._draft.bytes_of(self._vocabulary.inputs[joint_id])
            self._spans[joint_id] = span
        return joint_id, span

    def is_special(self, joint_id: int) -> bool:
        """Whether a token is special for either side; nothing is drafted after it."""
        is_targets = joint_id < self._vocabulary.num_target
        return (is_targets and joint_id in self._target.special) or (
            self._vocabulary.inputs[joint_id] in self._draft.special
        )

    def is_shared(self, joint_id: int) -> bool:
        """Whether the target also has this token."""
        return joint_id < self._vocabulary.num_target

    def _is_the_drafts(self, target_id: int) -> bool:
        return self._vocabulary.joint_ids[self._vocabulary.inputs[target_id]] == target_id

    def opening(self, token_ids: Sequence[int]) -> list[Piece]:
        """The pieces of a whole text, after the tokens that the draft's tokenizer puts before every text. At least
        one.
        """
        pieces = self._write(b"", token_ids)
        before = [self._vocabulary.joint_ids[token_id] for token_id in self._draft.before]
        if [joint_id for joint_id, _ in pieces[: len(before)]] != before:
            pieces = [*((joint_id, b"") for joint_id in before), *pieces]
        return pieces or [(self._vocabulary.joint_ids[0], b"")]

    def follow(
        self, committed: Sequence[Piece], drafted: Sequence[Piece], new: Sequence[int], floor: int
    ) -> tuple[int, list[Piece]]:
        """Update a sequence's pieces for new committed tokens.

        Args:
            committed: pieces of the earlier tokens.
            drafted: pieces after them.
            new: newly committed tokens of the target.
            floor: number of leading pieces of `committed` that must stay; at least 1.

        Returns:
            The number of pieces of `committed` and `drafted` that stay, and the pieces after them; together the text
            with the new tokens. Later drafted pieces stay only if no piece is new.
        """
        data = b"".join(self._target.bytes_of(token_id) for token_id in new)
        length = 0
        for index, (_, span) in enumerate(drafted):
            if data[length : length + len(span)] != span:
                break
            length += len(span)
            if length == len(data):
                return len(committed) + index + 1, []
        start = self._rewritten_from(committed, floor)
        tail = b"".join(span for _, span in committed[start:])
        pieces = self._write(tail, new)
        held = [*committed[start:], *drafted]
        num_same = next((i for i, (a, b) in enumerate(zip(held, pieces, strict=False)) if a != b), None)
        if num_same is None:
            num_same = min(len(held), len(pieces))
        return start + num_same, pieces[num_same:]

    def written(self, committed: Sequence[int], drafted: Sequence[Piece]) -> Written:
        """Drafted text as the target's tokens after its committed ones.

        If its tokenizer would merge tokens across the boundary, the text is tokenized alone. Bytes of an incomplete
        character are left out, and so is a special token that only the draft has.
        """
        last = drafted[-1][0] if drafted and self.is_special(drafted[-1][0]) else None
        text_pieces = drafted if last is None else drafted[:-1]
        data, _ = split_half_character(b"".join(span for _, span in text_pieces))
        tail = self._tail(committed)
        settled, rest = self._target.settled(tail + data)
        start = self._boundary(settled, len(tail))
        if start is None or len(rest) > len(data):
            settled, rest = self._target.settled(data)
            start = 0
        token_ids = settled[start:]
        num_settled = len(token_ids)
        if rest:
            shared = self._shared_end(text_pieces, rest)
            token_ids += shared or [token_id for token_id, _ in self._target.encode(rest)]
            if shared or last is not None:
                num_settled = len(token_ids)
        ends: list[int] = []
        for token_id in token_ids:
            ends.append((ends[-1] if ends else 0) + len(self._target.bytes_of(token_id)))
        if last is not None and self.is_shared(last):
            token_ids = [*token_ids, last]
            ends.append((ends[-1] if ends else 0) + 1)
            num_settled = len(token_ids)
        return Written(tuple(token_ids), tuple(ends), num_settled)

    def _write(self, data: bytes, token_ids: Sequence[int]) -> list[Piece]:
        """The draft's pieces of text, then of the target's tokens."""
        pieces: list[Piece] = []
        for run in self._runs(data, token_ids):
            if isinstance(run, int):
                pieces.append(self.piece(run))
            else:
                joint = self._vocabulary.joint_ids
                pieces += [(joint[token_id], span) for token_id, span in self._draft.encode(run)]
        return pieces

    def _runs(self, data: bytes, token_ids: Sequence[int]) -> Iterator[bytes | int]:
        """Runs of text, and special tokens that both sides have."""
        for token_id in token_ids:
            if token_id in self._target.special and self._is_the_drafts(token_id):
                if data:
                    yield data
                yield token_id
                data = b""
            else:
                data += self._target.bytes_of(token_id)
        if data:
            yield data

    def _rewritten_from(self, committed: Sequence[Piece], floor: int) -> int:
        """Index of the first piece to tokenize again: no later piece is special or begins inside a character."""
        start = len(committed)
        while start > max(floor, len(committed) - LOOK_BACK) and not self.is_special(committed[start - 1][0]):
            start -= 1
        while floor < start < len(committed) and not committed[start][1]:
            start -= 1
        return start

    def _tail(self, committed: Sequence[int]) -> bytes:
        """The text of the last committed tokens after the last special one."""
        tail: list[bytes] = []
        for token_id in reversed(committed[-LOOK_BACK:]):
            if token_id in self._target.special:
                break
            tail.append(self._target.bytes_of(token_id))
        return b"".join(reversed(tail))

    def _boundary(self, token_ids: Sequence[int], num_bytes: int) -> int | None:
        """Number of tokens that make up `num_bytes`; None if a token crosses the end."""
        length = 0
        for index, token_id in enumerate(token_ids):
            if length >= num_bytes:
                return index if length == num_bytes else None
            length += len(self._target.bytes_of(token_id))
        return len(token_ids) if length == num_bytes else None

    def _shared_end(self, drafted: Sequence[Piece], rest: bytes) -> list[int]:
        """The last drafted tokens, if the target has them and they equal the rest: it may well write them."""
        shared: list[int] = []
        for joint_id, span in reversed(drafted):
            if not self.is_shared(joint_id) or not rest.endswith(span) or not span:
                return []
            shared.append(joint_id)
            rest = rest[: len(rest) - len(span)]
            if not rest:
                return shared[::-1]
        return []
