"""Captured passes of a head, in the buckets and memory of the target's captured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from specdec.drafting.heads.cache import HeadCache, LaidOut
from specdec.drafting.heads.passes import HeadPass, Projection
from specdec.engine.cuda import buckets
from specdec.engine.cuda.buckets import bucket_of, empty_batch, fill, row_bucket, table_blocks
from specdec.engine.cuda.passes import GraphStore
from specdec.engine.model.device_choice import ReplayingModel

_NUM_PREPARED = 5
"""Row buckets captured at the start: one session's levels, or a few sessions' chains."""
_Key = tuple[HeadPass | Projection, int]
"""A pass and its rows."""


@dataclass(slots=True)
class _Graph:
    states: torch.Tensor
    """Input states; rows past a call's own keep old values."""
    rows: LaidOut | None
    """None for a projection."""
    replay: Callable[[], None]
    result: torch.Tensor
    """A replay's output, in memory that other replays overwrite."""


class HeadReplays:
    """Replays over one head's cache. A pass is captured at first use unless `prepare` did so.

    Cost of a replay: two copies on the device before and one after it; with attention, one more launch.
    """

    def __init__(self, steps: ReplayingModel, cache: HeadCache, dtype: torch.dtype, max_len: int) -> None:
        """`steps`: the target's replays, whose graph memory is shared; `dtype`: of the head's states; `max_len`: most
        tokens of a sequence.
        """
        self._steps = steps
        self._cache = cache
        self._dtype = dtype
        self._num_blocks = min(cache.spare_block, table_blocks(max_len, cache.block_size))
        self._graphs: GraphStore[_Key, _Graph] = GraphStore(
            steps.graphs, "a head's pass", may_replay=lambda: bool(steps.row_edges)
        )

    def run(self, each: HeadPass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor | None:
        """See `ReplayingModel`."""
        bucket = bucket_of(rows.batch, self._num_blocks)
        graph = None if bucket is None else self._graphs.get((each, bucket), self._captured)
        if graph is None or graph.rows is None:
            return None
        num_rows = len(states)
        fill(graph.rows.batch, rows.batch, self._cache.spare_block, self._cache.block_size)
        graph.rows.positions[:num_rows].copy_(rows.positions)
        return _replayed(graph, states)

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor | None:
        """See `ReplayingModel`."""
        num_rows = row_bucket(len(hidden))
        graph = None if num_rows is None else self._graphs.get((each, num_rows), self._captured)
        return None if graph is None else _replayed(graph, hidden)

    @torch.inference_mode()
    def prepare(self, kinds: Iterable[HeadPass | Projection]) -> None:
        """See `ReplayingModel`."""
        cache = self._cache
        one, other = (
            empty_batch(1, self._num_blocks, cache.device, cache.spare_block, cache.block_size) for _ in range(2)
        )
        fill(one, other, cache.spare_block, cache.block_size)  # which no capture runs: it is compiled here
        kinds, prepared = list(kinds), buckets.ROW_BUCKETS[:_NUM_PREPARED]
        keys = [(each, num_rows) for num_rows in reversed(prepared) for each in kinds]
        self._graphs.prepare(keys, self._captured)

    def _captured(self, key: _Key) -> _Graph:
        each, num_rows = key
        if isinstance(each, Projection):
            hidden, project = self._states(each, num_rows), each.compute
            return _Graph(hidden, None, *self._steps.graphs.capture(lambda: project(hidden)))
        cache, compute, states = self._cache, each.compute, self._states(each, num_rows)
        batch = empty_batch(num_rows, self._num_blocks, cache.device, cache.spare_block, cache.block_size)
        rows = LaidOut(batch, torch.zeros(num_rows, dtype=torch.int64, device=cache.device))
        return _Graph(
            states, rows, *self._steps.graphs.capture(lambda: compute(states, rows, cache.attend(rows.batch)))
        )

    def _states(self, each: HeadPass | Projection, num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, *each.state_shape, dtype=self._dtype, device=self._cache.device)


def _replayed(graph: _Graph, states: torch.Tensor) -> torch.Tensor:
    num_rows = len(states)
    graph.states[:num_rows].copy_(states)
    graph.replay()
    return graph.result[:num_rows].clone()
