"""Prompt look-up: what followed the last tokens where they stood before, in prompt or output.

Occurrences of which more tokens agree come first, then newer ones: of a text that is edited the newest version is the
one that goes on. The first gives a chain, others branch off where they differ. A text that repeats itself is continued
past its end. No state but the session's index; a step costs 5 to 40 us.
"""

from __future__ import annotations

from specdec.config.drafter_options import NgramOptions
from specdec.drafting.interface import ROOT, Capabilities, Context, GrowingOffer, Offer, Room

CAPABILITIES = Capabilities(places=frozenset({"target", "draft_service"}))
_MOST_MATCHES = 24
_MOST_BRANCHES = 4
_DOUBT = 0.6
"""A match of n tokens is wrong with this probability to the power of n: a first word, which calibration corrects."""


class Ngram:
    """One for all sessions: it keeps nothing of its own."""

    name = "ngram"
    capabilities = CAPABILITIES

    def __init__(self, options: NgramOptions) -> None:
        self._min, self._max = options.prompt_lookup_min, options.prompt_lookup_max
        self._key_length = min(2, self._min)

    def open(self, context: Context) -> Ngram:
        """All sessions are alike."""
        return self

    def close(self, context: Context) -> None:
        """Nothing is kept."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        """Chains from the best occurrences. Cost: as many comparisons as agree, and the nodes offered."""
        index = context.index(self._key_length)
        if len(index) < len(context.token_ids):
            return None  # a long prompt is still being taken in: what its end is followed by is not known yet
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
        """What follows at `start`; past the end of the text, what was just offered."""
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
