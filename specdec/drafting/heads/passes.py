"""A head's passes: replays of captured graphs on a GPU, else plain calls.

A tree needs one pass per level. A pass over a few rows has about a hundred small kernels, whose launches on a GPU would
take longer than the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.drafting.heads.cache import HeadCache, LaidOut
from specdec.drafting.heads.parts import Attend

Compute = Callable[[torch.Tensor, LaidOut, Attend], torch.Tensor]
"""(states [T, ...], rows, attention) to [T, ...]."""
Project = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states [T, H] to [T, V]."""


@dataclass(frozen=True, slots=True)
class HeadPass:
    """One kind of pass over rows that attend. None of its operations may depend on data.

    `compute` refers to modules, never to the head: in a reference cycle a replaced head would keep its memory until a
    garbage collection, and a head of the start for ever, as start-up objects are frozen (`gc.freeze`).
    """

    name: str
    """Unique within a head."""
    state_shape: tuple[int, ...]
    """Shape of one row's input state."""
    compute: Compute


@dataclass(frozen=True, slots=True)
class Projection:
    """One kind of pass over independent rows, with the same rules as `HeadPass`."""

    name: str
    state_shape: tuple[int, ...]
    compute: Project


class PassReplays(Protocol):
    """Replays passes of a head."""

    def run(self, each: HeadPass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor | None:
        """The pass's result, owned by the caller; None: the caller must run the pass itself."""

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor | None:
        """The projection's result, as in `run`."""

    def prepare(self, kinds: Iterable[HeadPass | Projection]) -> None:
        """Capture likely passes, as time and memory allow."""


class HeadPasses:
    """Runs the passes of one head over its cache."""

    def __init__(self, cache: HeadCache, replays: PassReplays | None) -> None:
        """Without `replays` passes are plain calls."""
        self._cache = cache
        self._replays = replays

    def run(self, each: HeadPass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor:
        """Apply `compute` to states [T, *state_shape]; writes the rows' entries."""
        found = None if self._replays is None else self._replays.run(each, states, rows)
        if found is not None:
            return found
        return each.compute(states, rows, self._cache.attend(rows.batch))

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor:
        """Apply `compute` to states [T, *state_shape]."""
        found = None if self._replays is None else self._replays.project(each, hidden)
        return each.compute(hidden) if found is None else found

    def prepare(self, kinds: Iterable[HeadPass | Projection]) -> None:
        """Capture likely passes before the first request."""
        if self._replays is not None:
            self._replays.prepare(kinds)
