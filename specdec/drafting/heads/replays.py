"""Captured passes of a head, in the buckets and memory of the target's captured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from specdec.drafting.heads.cache import HeadCache, LaidOut
from specdec.drafting.heads.passes import HeadPass, Projection
from specdec.engine.cuda.buckets import ROW_BUCKETS, Key, all_buckets, bucket_of, empty_batch, fill, row_bucket
from specdec.engine.cuda.passes import GraphStore
from specdec.engine.model.device_choice import ReplayingModel

PATH_SLOTS_PER_ROW = 16
"""Path slots per row in captured passes, a power of two; deeper trees and longer blocks are not captured."""
_PREPARED_ROWS = ROW_BUCKETS[:5]
"""Row buckets captured at the start: one session's levels, or a few sessions' chains."""
_NO_TABLES: Key = (0, 0)
_Key = tuple[HeadPass | Projection, int, Key]
"""A pass, its rows, and its bucket; a projection has no tables."""


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

    def __init__(self, steps: ReplayingModel, cache: HeadCache, dtype: torch.dtype) -> None:
        """`steps`: the target's replays, whose graph memory is shared; `dtype`: of the head's states."""
        self._steps = steps
        self._cache = cache
        self._dtype = dtype
        self._graphs: GraphStore[_Key, _Graph] = GraphStore(
            steps.graphs, "a head's pass", may_replay=lambda: bool(steps.row_edges)
        )

    def run(self, each: HeadPass, states: torch.Tensor, rows: LaidOut) -> torch.Tensor | None:
        """See `ReplayingModel`."""
        key = bucket_of(rows.batch, self._cache.block_size, PATH_SLOTS_PER_ROW)
        graph = None if key is None else self._graphs.get(_key(each, key), self._captured)
        if graph is None or graph.rows is None:
            return None
        num_rows = len(states)
        fill(graph.rows.batch, rows.batch, self._cache.spare_block, self._cache.block_size)
        graph.rows.positions[:num_rows].copy_(rows.positions)
        return _replayed(graph, states)

    def project(self, each: Projection, hidden: torch.Tensor) -> torch.Tensor | None:
        """See `ReplayingModel`."""
        num_rows = row_bucket(len(hidden))
        graph = None if num_rows is None else self._graphs.get((each, num_rows, _NO_TABLES), self._captured)
        return None if graph is None else _replayed(graph, hidden)

    @torch.inference_mode()
    def prepare(self, kinds: Iterable[HeadPass | Projection], max_len: int) -> None:
        """See `ReplayingModel`."""
        kinds = list(kinds)
        self._compile_others(kinds)
        buckets = all_buckets(min(max_len, self._cache.first_scratch_slot), self._cache.block_size)
        keys = (_key(each, bucket) for bucket in buckets if bucket[0] in _PREPARED_ROWS for each in kinds)
        self._graphs.prepare(keys, self._captured)

    def _compile_others(self, kinds: Iterable[HeadPass | Projection]) -> None:
        """Compile the kernels that no capture runs: filling buckets, and attention over a single block."""
        for each in kinds:
            if isinstance(each, HeadPass):
                (states, rows), (_, static) = self._padding(each, (1, 1)), self._padding(each, (1, 1))
                fill(static.batch, rows.batch, self._cache.spare_block, self._cache.block_size)
                each.compute(states, rows, self._cache.attend(rows.batch))

    def _captured(self, key: _Key) -> _Graph:
        each, num_rows, bucket = key
        if isinstance(each, Projection):
            hidden, project = self._states(each, num_rows), each.compute
            return _Graph(hidden, None, *self._steps.graphs.capture(lambda: project(hidden)))
        states, rows = self._padding(each, bucket)
        compute, cache = each.compute, self._cache
        return _Graph(
            states, rows, *self._steps.graphs.capture(lambda: compute(states, rows, cache.attend(rows.batch)))
        )

    def _padding(self, each: HeadPass, key: Key) -> tuple[torch.Tensor, LaidOut]:
        """A pass's input of padding rows."""
        device = self._cache.device
        batch = empty_batch(key, device, self._cache.spare_block, self._cache.block_size, PATH_SLOTS_PER_ROW)
        positions = torch.zeros(key[0], dtype=torch.int64, device=device)
        return self._states(each, key[0]), LaidOut(batch, positions)

    def _states(self, each: HeadPass | Projection, num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, *each.state_shape, dtype=self._dtype, device=self._cache.device)


def _replayed(graph: _Graph, states: torch.Tensor) -> torch.Tensor:
    num_rows = len(states)
    graph.states[:num_rows].copy_(states)
    graph.replay()
    return graph.result[:num_rows].clone()


def _key(each: HeadPass | Projection, bucket: Key) -> _Key:
    return each, bucket[0], bucket if isinstance(each, HeadPass) else _NO_TABLES
