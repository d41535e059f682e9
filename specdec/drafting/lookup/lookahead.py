"""Lookahead decoding (arXiv:2402.02057): the target guesses its own future in extra rows of its step.

A window of W columns and N - 1 levels holds guesses of future tokens. Level 0 is a chain below the last committed
token, and column i hangs from its i-th token, so that the window's rows form a tree. The target's samples after the
last level complete one n-gram per column. These go into a pool, and become the window's newest level after the next
step. N-grams that begin with the last committed token are offered.

In coupled verification the target samples with each position's noise, so that a guess may equal its later token.
Rejection verification takes chains only, in which no window fits: nothing is offered.
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
"""First tokens whose n-grams a session keeps; the least recently used is dropped."""
_MOST_NODES = 64
"""Nodes of a step's tree, with the window."""
_SCORE = 0.5
"""Score of the pool's tokens; the target learns how often it is right."""

NGram = tuple[int, ...]


class Lookahead:
    """The drafter `lookahead`: one window and pool per session."""

    name = "lookahead"
    capabilities = CAPABILITIES

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options

    def open(self, context: Context) -> LookaheadSession:
        """Begin a session."""
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
        """Committed tokens at which the window begins."""
        self._newest: list[int | None] | None = None
        """The target's sample after each column in the last step."""
        self.pool: OrderedDict[int, OrderedDict[NGram, None]] = OrderedDict()
        """N-grams by first token, without that token; newest last."""

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
        """Take the target's samples of the step, by the uncommitted tokens before each."""
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
        """Move the window after a step: up one level for the samples, and right one column per further committed
        token.
        """
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
