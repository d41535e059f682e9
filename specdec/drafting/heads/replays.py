"""Captured passes of a head, in the buckets and memory of the target's captured steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specdec.drafting.heads.cache import HeadCache, LaidOut
from specdec.drafting.heads.passes import HeadPass, Projection
from specdec.engine.batch import Batch
from specdec.engine.cuda import buckets
from specdec.engine.cuda.buckets import BucketedPasses, Forward, PassShape, ReplayedPass, table_blocks
from specdec.engine.model.device_choice import ReplayingModel

_NUM_PREPARED = 5
"""Row buckets captured at the start: one session's levels, or a few sessions' chains."""


class HeadReplays:
    """Replays over one head's cache. A pass is captured at first use unless `prepare` did so."""

    def __init__(self, steps: ReplayingModel, cache: HeadCache, dtype: torch.dtype, max_len: int) -> None:
        """`steps`: the target's replays, whose graph memory is shared; `dtype`: of the head's states; `max_len`: most
        tokens of a sequence.
        """

        def made(each: HeadPass | Projection, num_rows: int) -> tuple[tuple[torch.Tensor, ...], Forward]:
            states = torch.zeros(num_rows, *each.state_shape, dtype=dtype, device=cache.device)
            if isinstance(each, Projection):
                project = each.compute
                return (states,), lambda _: project(states)
            compute, positions = each.compute, torch.zeros(num_rows, dtype=torch.int64, device=cache.device)

            def run(batch: Batch) -> torch.Tensor:
                return compute(states, LaidOut(batch, positions), cache.attend(batch))

            return (states, positions), run

        num_blocks = min(cache.spare_block, table_blocks(max_len, cache.block_size))
        shape = PassShape(num_blocks, cache.spare_block, cache.block_size, cache.device)
        self._passes: BucketedPasses[HeadPass | Projection] = BucketedPasses(
            steps.graphs, "a head's pass", shape, made, may_replay=lambda: bool(steps.row_edges)
        )

    def run(self, each: HeadPass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor | None:
        """See `ReplayingModel`."""
        return _own_rows(self._passes.replayed(each, rows.batch, states, rows.positions), states)

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor | None:
        """See `ReplayingModel`."""
        return _own_rows(self._passes.replayed(each, None, hidden), hidden)

    @torch.inference_mode()
    def prepare(self, kinds: Iterable[HeadPass | Projection]) -> None:
        """See `ReplayingModel`."""
        kinds, prepared = list(kinds), buckets.ROW_BUCKETS[:_NUM_PREPARED]
        self._passes.prepare((each, num_rows) for num_rows in reversed(prepared) for each in kinds)


def _own_rows(found: ReplayedPass | None, states: torch.Tensor) -> torch.Tensor | None:
    return None if found is None else found.result[: len(states)].clone()
