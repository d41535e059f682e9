"""A head's passes: replays of captured graphs on a GPU, else plain calls.

A tree needs one pass per level. A pass over a few rows has about a hundred small kernels, whose launches on a GPU would
take longer than the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from specdec.drafting.heads.cache import HeadCache, LaidOut
from specdec.drafting.heads.parts import Attend
from specdec.engine.cuda import buckets
from specdec.engine.cuda.buckets import BucketedPasses, BucketedSteps, Forward, PassShape, table_blocks

_NUM_PREPARED = 5
"""Row buckets captured at the start: one session's levels, or a few sessions' chains."""

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


class _Replays(BucketedPasses[HeadPass | Projection]):
    """Captured passes of a head."""

    def __init__(self, cache: HeadCache, steps: BucketedSteps, dtype: torch.dtype, max_len: int) -> None:
        num_blocks = min(cache.spare_block, table_blocks(max_len, cache.block_size))
        shape = PassShape(num_blocks, cache.spare_block, cache.block_size, cache.device)
        super().__init__(steps.capture, "a head's pass", shape, may_replay=lambda: bool(steps.row_edges))
        self._cache, self._dtype = cache, dtype

    def made(self, kind: HeadPass | Projection, num_rows: int) -> tuple[tuple[torch.Tensor, ...], Forward]:
        cache = self._cache
        states = torch.zeros(num_rows, *kind.state_shape, dtype=self._dtype, device=cache.device)
        if isinstance(kind, Projection):
            project = kind.compute
            return (states,), lambda _: project(states)
        compute, positions = kind.compute, torch.zeros(num_rows, dtype=torch.int64, device=cache.device)
        return (states, positions), lambda batch: compute(states, LaidOut(batch, positions), cache.attend(batch))


class HeadPasses:
    """Runs the passes of one head over its cache. With replays, a pass is captured at first use unless `prepare` did
    so.
    """

    def __init__(self, cache: HeadCache, steps: BucketedSteps | None, dtype: torch.dtype, max_len: int) -> None:
        """`steps`: the target's replays, whose graph memory is shared; None: passes are plain calls; `dtype`: of the
        head's states; `max_len`: most tokens of a sequence.
        """
        self._cache = cache
        self.replays = None if steps is None else _Replays(cache, steps, dtype, max_len)

    def run(self, each: HeadPass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor:
        """Apply `compute` to states [T, *state_shape]; writes the rows' entries."""
        found = None if self.replays is None else self.replays.replayed(each, rows.batch, states, rows.positions)
        if found is not None:
            return found.result[: len(states)].clone()  # other replays overwrite it
        return each.compute(states, rows, self._cache.attend(rows.batch))

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor:
        """Apply `compute` to states [T, *state_shape]."""
        found = None if self.replays is None else self.replays.replayed(each, None, hidden)
        return each.compute(hidden) if found is None else found.result[: len(hidden)].clone()

    def prepare(self, kinds: Iterable[HeadPass | Projection]) -> None:
        """Capture likely passes before the first request, as time and memory allow."""
        if self.replays is not None:
            kinds, prepared = list(kinds), buckets.ROW_BUCKETS[:_NUM_PREPARED]
            self.replays.capture_ahead((each, num_rows) for num_rows in reversed(prepared) for each in kinds)
