"""Proposes the text that the client expects, while the output agrees with it.

When they differ, it offers the places where the output may rejoin the text: one token on (replacement), the same place
(insertion), or after the next occurrence of the new token (deletion). Once two tokens agree with a place, it follows
that place: longest match first, then the nearest place ahead. If the prompt already ends with the text's first lines,
it continues from there. A step costs 2 to 20 us.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.config.drafter_options import PredictionOptions
from specdec.drafting.corpus import Corpus
from specdec.drafting.interface import ROOT, Capabilities, Context, GrowingOffer, Offer, Room

CAPABILITIES = Capabilities()
_KEY_LENGTH = 2
_MOST_MATCHES = 32
_LONGEST_MATCH = 16
_LEAST_PROMPT_MATCH = 4
"""Tokens at the prompt's end that must match to start inside the text; otherwise the output starts at its beginning."""
_LOOK_AHEAD = 64
"""Tokens ahead in which the next occurrence of a token is searched."""
_GUESS = 0.35
"""Score of a place that is merely near."""


class PredictionDrafter:
    """The drafter `prediction`, for requests with an expected text."""

    name = "prediction"
    capabilities = CAPABILITIES

    def __init__(self, options: PredictionOptions) -> None:
        pass

    def open(self, context: Context) -> FollowedPrediction | None:
        """None for a session without a prediction."""
        return FollowedPrediction(context) if len(context.prediction) else None


class FollowedPrediction:
    """One session's place in its expected text."""

    def __init__(self, context: Context) -> None:
        self._text = Corpus(_KEY_LENGTH)
        self._expected = list(context.prediction)
        self._next = 0
        """Index of the next expected token; when lost, the last one followed."""
        self._num_agreed = 0
        self._is_lost = False
        self._is_placed = False
        """Whether the start was searched for."""
        self._num_seen = context.num_prompt_tokens

    def close(self, context: Context) -> None:
        """Nothing to free."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        """The expected text at the likeliest places."""
        self._text.follow(self._expected)
        tokens = context.token_ids
        if not self._is_placed:
            self._is_placed = True
            found = self._places(tokens[: context.num_prompt_tokens])
            if found and found[0][1] >= _LEAST_PROMPT_MATCH:
                self._next = found[0][0]
        for index in range(self._num_seen, len(tokens)):
            self._see(tokens[index])
        self._num_seen = len(tokens)
        growing = GrowingOffer(room)
        if not self._is_lost:
            self._chain(growing, self._next, (self._num_agreed + 2) / (self._num_agreed + 3), room.depth)
            return growing.done()
        if found := self._places(tokens):
            start, length = found[0]
            self._next, self._num_agreed, self._is_lost = start, length, False
            self._chain(growing, start, (length + 1) / (length + 3), room.depth)
        else:
            for place in self._near(tokens[-1]):
                self._chain(growing, place, _GUESS, max(1, room.depth // 2))
        return growing.done()

    def _places(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Places in the expected text after the tokens' end, with the match's length; the likeliest first."""
        found = self._text.matches(tokens, _LONGEST_MATCH, _MOST_MATCHES)
        return sorted(found, key=lambda match: (-match[1], match[0] < self._next, abs(match[0] - self._next)))

    def _see(self, token: int) -> None:
        if not self._is_lost and self._next < len(self._expected) and self._expected[self._next] == token:
            self._next += 1
            self._num_agreed += 1
        else:
            self._is_lost, self._num_agreed = True, 0

    def _near(self, token: int) -> list[int]:
        """Places to continue at after an unexpected token."""
        ahead = self._expected[self._next : self._next + _LOOK_AHEAD]
        places = [self._next + ahead.index(token) + 1] if token in ahead else []
        return [*places, self._next + 1, self._next]

    def _chain(self, growing: GrowingOffer, start: int, score: float, depth: int) -> None:
        above = ROOT
        for token in self._expected[start : start + depth]:
            node = growing.add(above, token, score)
            if node is None:
                return
            above, score = node, (score + 1) / 2
