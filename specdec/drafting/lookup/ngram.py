"""Prompt look-up: proposes what followed earlier occurrences of the last tokens, in prompt or output.

Longer matches come first, then newer ones: the newest version of an edited text is the likeliest. The first match gives
a chain; others branch off where they differ. A text that repeats itself is continued past its end. The session's index
is the only state. A step costs 5 to 40 us.
"""

from __future__ import annotations

from specdec.config.drafter_options import NgramOptions
from specdec.drafting.interface import ROOT, Capabilities, Context, GrowingOffer, Offer, Room

CAPABILITIES = Capabilities(places=frozenset({"target", "draft_service"}))
_MOST_MATCHES = 24
_MOST_BRANCHES = 4
_DOUBT = 0.6
"""Assumed probability that a match of one token is wrong; of n tokens, its n-th power. The target corrects it."""


class Ngram:
    """The drafter `ngram`, without state of its own."""

    name = "ngram"
    capabilities = CAPABILITIES

    def __init__(self, options: NgramOptions) -> None:
        self._min, self._max = options.prompt_lookup_min, options.prompt_lookup_max
        self._key_length = min(2, self._min)

    def open(self, context: Context) -> Ngram:
        """Begin a session."""
        return self

    def close(self, context: Context) -> None:
        """Nothing to free."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        """Chains from the best occurrences. Cost: linear in matching tokens and offered nodes."""
        index = context.index(self._key_length)
        if len(index) < len(context.token_ids):
            return None  # a long prompt is not fully indexed yet
        found = [match for match in index.matches(context.token_ids, self._max, _MOST_MATCHES) if match[1] >= self._min]
        if not found:
            return None
        found.sort(key=lambda match: -match[1])
        growing = GrowingOffer(room)
        firsts: set[int] = set()
        doubt = 1.0
        for start, length in found:
            first = index.token(start)
            if first in firsts:
                continue
            firsts.add(first)
            wrong = _DOUBT**length
            self._chain(growing, context, start, length, doubt * (1 - wrong), room.depth)
            doubt *= wrong
            if growing.is_full or len(firsts) == _MOST_BRANCHES:
                break
        return growing.done()

    def _chain(
        self, growing: GrowingOffer, context: Context, start: int, length: int, score: float, depth: int
    ) -> None:
        """Offer the tokens from `start` on; past the end of the text, the tokens just offered."""
        committed = context.token_ids
        chain: list[int] = []
        node: int | None = ROOT
        while len(chain) < depth and node is not None:
            position = start + len(chain)
            token = committed[position] if position < len(committed) else chain[position - len(committed)]
            chain.append(token)
            node = growing.add(node, token, score)
            length += 1
            score = 1 - _DOUBT**length
