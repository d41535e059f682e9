"""A head's passes: run as they are, or where there are replays as one of what was captured for so many rows.

A pass over a few rows is some hundred small kernels, and one is made for each level of a tree: on a GPU their launches
would take longer than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.drafting.heads.cache import HeadCache, LaidOut
from specdec.drafting.heads.parts import Attend

Compute = Callable[[torch.Tensor, LaidOut, Attend], torch.Tensor]
"""From states [T, ...] of rows, these, and attention among them to [T, ...]."""
Project = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states [T, H] to [T, V]."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One kind of pass over rows that attend. No operation of it may depend on data.

    `compute` refers to modules, and not to the head that has it: in a cycle one that was exchanged would keep its
    memory until somebody looks for cycles, and one of the start for good, as what is there then is left out of that.
    """

    name: str
    """Its own among those of a head."""
    state_shape: tuple[int, ...]
    """Of what each row goes in with."""
    compute: Compute


@dataclass(frozen=True, slots=True)
class Projection:
    """One kind of pass in which rows know nothing of one another; the same holds for it."""

    name: str
    state_shape: tuple[int, ...]
    compute: Project


class Replays(Protocol):
    """Replays passes of a head."""

    def run(self, each: Pass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor | None:
        """What the pass gives, to be kept as long as one likes; None where it has to be run as it is."""

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor | None:
        """The same."""

    def prepare(self, kinds: Iterable[Pass | Projection], max_len: int) -> None:
        """Capture what first steps need, for contexts up to `max_len` tokens, as far as time and memory go."""


class HeadPasses:
    """Runs the passes of one head over its cache."""

    def __init__(self, cache: HeadCache, replays: Replays | None) -> None:
        """Without `replays` all are run as they are."""
        self._cache = cache
        self._replays = replays

    def run(self, each: Pass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor:
        """States [T, *state_shape] of rows to what `compute` makes of them; their entries are written."""
        found = None if self._replays is None else self._replays.run(each, states, rows)
        if found is not None:
            return found
        return each.compute(states, rows, self._cache.attend(rows.batch))

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor:
        """States [T, *state_shape] to what `compute` makes of them."""
        found = None if self._replays is None else self._replays.project(each, hidden)
        return each.compute(hidden) if found is None else found

    def prepare(self, kinds: Iterable[Pass | Projection], max_len: int) -> None:
        """Do what can be done before the first request, for contexts up to `max_len` tokens."""
        if self._replays is not None:
            self._replays.prepare(kinds, max_len)
