"""Lookahead decoding (arXiv:2402.02057): the target guesses its own future in rows beside its step.

A window of W columns and N - 1 levels holds guesses for the positions that come. Level 0 is a chain below the last
committed token, and each column hangs from its token there: a tree, so that its rows are those of any offer. What the
target draws after the last level completes an n-gram per column, which goes into a pool, and becomes the newest level
of the window after the next step. N-grams that begin with the last committed token are offered.

The target draws with the noise of each position (coupled verification), so that a guess may be the very token that is
drawn there later. Rejection verification takes chains only, in which no window fits: nothing is offered there.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from specdec.config.drafter_options import LookaheadOptions
from specdec.drafting.interface import ROOT, Capabilities, Context, GrowingOffer, Offer, Room

CAPABILITIES = Capabilities(reads_drawn=True)
MOST_KEYS = 1024
"""Tokens whose n-grams a session keeps; that of the one unused for longest leaves first."""
_MOST_NODES = 64
"""Of a step's tree."""
_SCORE = 0.5
"""Of what is in the pool; how often it is right is learnt."""

NGram = tuple[int, ...]


class Lookahead:
    """Makes a window and a pool for each session."""

    name = "lookahead"
    capabilities = CAPABILITIES

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options

    def open(self, context: Context) -> LookaheadSession:
        """A session of its own."""
        return LookaheadSession(self._options, context)


class LookaheadSession:
    """One session's window and pool."""

    def __init__(self, options: LookaheadOptions, context: Context) -> None:
        self._width, self._num_levels = options.window_size, options.ngram_size - 1
        self._num_guesses = options.guess_set_size
        self._random = random.Random(len(context.token_ids))
        self._context = context
        self._levels = [[self._any() for _ in range(self._width)] for _ in range(self._num_levels)]
        self._num_tokens = len(context.token_ids)
        """For which the window was laid out."""
        self._newest: list[int | None] | None = None
        """What the target drew after each column in the last step."""
        self.pool: OrderedDict[int, OrderedDict[NGram, None]] = OrderedDict()
        """By first token the tokens that may follow, newest last."""

    def propose(self, context: Context, room: Room) -> Offer | None:
        """N-grams of the pool, newest first, and the window."""
        if room.is_chain:
            return None
        self._shift(len(context.token_ids))
        window = self._width * self._num_levels
        guesses = GrowingOffer(Room(min(room.num_nodes, _MOST_NODES - window), room.depth))
        for ngram in reversed(self.pool.get(context.token_ids[-1], {})):
            above: int | None = ROOT
            for token in ngram:
                above = None if above is None else guesses.add(above, token, _SCORE)
        found = guesses.done() or Offer([], [], [])
        offer = replace(found, first_window_node=len(found.token_ids))
        first = ROOT
        for column, token in enumerate(self._levels[0]):
            first = parent = _hang(offer, first, token)
            for level in self._levels[1:]:
                parent = _hang(offer, parent, level[column])
        return offer

    def drawn(self, tokens: Mapping[NGram, int]) -> None:
        """What the target drew in the step, by the tokens between the last committed one and the place."""
        self._newest = []
        for column in range(self._width):
            below = tuple(level[column] for level in self._levels[1:])
            token = tokens.get((*self._levels[0][: column + 1], *below))
            self._newest.append(token)
            if token is not None:
                self._keep(self._levels[0][column], (*below, token))

    def close(self, context: Context) -> None:
        """The session has ended."""
        self.pool.clear()

    def _shift(self, num_tokens: int) -> None:
        """The window after a step: a level on for what was drawn, and as many columns on as tokens came besides."""
        num_new, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        if num_new <= 0:
            return
        if self._newest is not None:
            newest = [self._any() if token is None else token for token in self._newest]
            self._levels = [*self._levels[1:], newest]
            num_new -= 1
            self._newest = None
        kept = min(num_new, self._width)
        self._levels = [[*level[kept:], *(self._any() for _ in range(kept))] for level in self._levels]

    def _keep(self, first: int, ngram: NGram) -> None:
        known = self.pool.setdefault(first, OrderedDict())
        known[ngram] = None
        known.move_to_end(ngram)
        if len(known) > self._num_guesses:
            known.popitem(last=False)
        self.pool.move_to_end(first)
        if len(self.pool) > MOST_KEYS:
            self.pool.popitem(last=False)

    def _any(self) -> int:
        return self._random.choice(self._context.token_ids)


def _hang(offer: Offer, parent: int, token: int) -> int:
    offer.token_ids.append(token)
    offer.parents.append(parent)
    offer.scores.append(0.0)
    return len(offer.token_ids) - 1
