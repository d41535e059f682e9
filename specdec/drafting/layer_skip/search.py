"""Searches, while serving, for the best sublayers to skip (SWIFT, arXiv:2410.06916).

A set's score is the share of recent tokens that a pass without it reproduces. New sets are random; half of them are
neighbours of the best one. Every 25th is the most promising of many by the upper confidence bound of a Gaussian process
over all scores.
"""

from __future__ import annotations

import random
from collections import deque

import torch

from specdec.engine.sublayers import SkippedSublayers

GOOD_ENOUGH = 0.95
MOST_TRIALS = 1000
MOST_VAIN_TRIALS = 300
_PROCESS_EVERY = 25
_MOST_OBSERVED = 200
"""Scores that the Gaussian process uses; its cost is cubic in them."""
_DRAWN = 64
_NOISE = 1e-2
_KAPPA = 2.5
_SETTLED = 8
"""Windows averaged in the best set's score; the search may end only after as many."""

Chosen = frozenset[int]
"""Numbers of sublayers: attention of layer i is 2i, its MLP 2i + 1."""


class SkipSearch:
    """Proposes sets and keeps the best one. The first and the last layer always run."""

    def __init__(self, num_layers: int, skip_ratio: float) -> None:
        """`skip_ratio`: share of the inner layers' sublayers to skip. Raises ValueError below three layers."""
        self._candidates = list(range(2, 2 * num_layers - 2))
        if not self._candidates:
            raise ValueError(
                f"layer_skip: a model of {num_layers} layers has no inner layer to skip; use another drafter"
            )
        self._num_skipped = max(1, round(skip_ratio * len(self._candidates)))
        step = len(self._candidates) / self._num_skipped
        self.best: Chosen = frozenset(self._candidates[int(i * step)] for i in range(self._num_skipped))
        """The best set; at first spread evenly."""
        self.matchness: float | None = None
        """Mean score of the best set; None: nothing was scored."""
        self.num_trials = 0
        self._num_vain = 0
        self._num_windows = 0
        self._challenger: Chosen | None = None
        self._observed: deque[tuple[Chosen, float]] = deque(maxlen=_MOST_OBSERVED)
        self._random = random.Random(num_layers)

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return (
            (self.matchness is not None and self._num_windows == _SETTLED and self.matchness >= GOOD_ENOUGH)
            or self.num_trials >= MOST_TRIALS
            or self._num_vain >= MOST_VAIN_TRIALS
        )

    @property
    def skipped(self) -> SkippedSublayers:
        """The best set, in the engine's form."""
        return as_skipped(self.best)

    def propose(self) -> Chosen:
        """The set to score next beside the best one, on the same window. A winner must win a second time."""
        if self._challenger is not None:
            return self._challenger
        if self.num_trials % _PROCESS_EVERY == _PROCESS_EVERY - 1 and len(self._observed) > 1:
            return self._most_promising([self._draw() for _ in range(_DRAWN)])
        return self._draw()

    def observe(self, trial: Chosen, score: float, score_of_best: float) -> bool:
        """Take both sets' scores in [0, 1] on one window. Returns whether the trial is the new best set."""
        self.num_trials += 1
        self._num_vain += 1
        self._observed.append((trial, score))
        self._num_windows = min(_SETTLED, self._num_windows + 1)
        known = score_of_best if self.matchness is None else self.matchness
        self.matchness = known + (score_of_best - known) / self._num_windows
        won, was_challenger = score > score_of_best, trial == self._challenger
        self._challenger = trial if won and not was_challenger else None
        if not (won and was_challenger):
            return False
        self.best, self.matchness = trial, score
        self._num_vain, self._num_windows = 0, 1
        return True

    def _draw(self) -> Chosen:
        if self._random.random() < 0.5:
            return frozenset(self._random.sample(self._candidates, self._num_skipped))
        left = [each for each in self._candidates if each not in self.best]
        num_changed = min(self._random.choice((1, 2)), len(left), self._num_skipped)
        gone = set(self._random.sample(sorted(self.best), num_changed))
        return (self.best - gone) | frozenset(self._random.sample(left, num_changed))

    def _most_promising(self, drawn: list[Chosen]) -> Chosen:
        known = self._as_rows([chosen for chosen, _ in self._observed])
        scores = torch.tensor([score for _, score in self._observed], dtype=torch.float64)
        asked = self._as_rows(drawn)
        covariance = self._kernel(known, known) + _NOISE * torch.eye(len(known), dtype=torch.float64)
        root = torch.linalg.cholesky(covariance)
        between = self._kernel(asked, known)
        mean = scores.mean()
        expected = mean + (between @ torch.cholesky_solve((scores - mean).unsqueeze(1), root)).squeeze(1)
        explained = torch.linalg.solve_triangular(root, between.T, upper=False).square().sum(dim=0)
        spread = scores.std() + 1e-3
        bound = expected + _KAPPA * spread * (1 - explained).clamp_min(0).sqrt()
        return drawn[int(bound.argmax())]

    def _as_rows(self, sets: list[Chosen]) -> torch.Tensor:
        return torch.tensor([[float(each in chosen) for each in self._candidates] for chosen in sets]).double()

    def _kernel(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Similarity of sets: exp(-(number of differing sublayers) / (2 x number skipped))."""
        return torch.exp(-torch.cdist(left, right).square() / (2 * self._num_skipped))


def as_skipped(chosen: Chosen) -> SkippedSublayers:
    """A set in the engine's form."""
    return SkippedSublayers(
        frozenset(each // 2 for each in chosen if each % 2 == 0), frozenset(each // 2 for each in chosen if each % 2)
    )
