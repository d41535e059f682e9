"""Several tokens of each row in one captured graph: draw, compute what was drawn, draw again, without the host."""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.buckets import advance, empty_batch, row_bucket, table_bucket
from specdec.engine.cuda.cuts import NUM_CUT_WORDS, CutKinds, cut_parameters, launch_cuts
from specdec.engine.cuda.sampling import MOST_TOP, launch_top, read_top, row_parameters
from specdec.engine.drawing.other_ids import IdTables, OtherIds
from specdec.engine.drawing.rows import Draw, DrawRow
from specdec.engine.model.device_choice import Replays
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE, RowContext, cut_arguments
from specdec.engine.sampling.noise import Purpose, noise_key
from specdec.engine.sampling.sampler import Sampler

ROUND_BUCKETS = (2, 4, 8)
"""Draws of a graph; the first one is made before it, from logits that are there."""
_USE_WEIGHT = 0.1
"""Of one call in the mean of how many of its draws were of use."""
_USE_MARGIN = 1.5
"""A graph has so many times the draws that were of use on average. Chosen, not measured."""
_PREPARED_ROWS = (8, 4, 2, 1)
_MOST_GRAPHS = 64

Key = tuple[int, int, int, int, CutKinds | None]
"""Rows, blocks of a table, draws, tokens per draw, and cuts if there are any."""


@dataclass(slots=True)
class _Graph:
    state: torch.Tensor
    """All that a call uploads, int32, as `_Parts` has it."""
    cuts: CutKinds | None
    drawn: torch.Tensor
    """[draws, rows, 2, num_top] int32, of which the caller fills the first."""
    replay: Callable[[], None]
    results: torch.Tensor
    """What a replay fills; the same as `drawn` on a device."""


class _Parts(NamedTuple):
    """Views of a graph's state, on the host or on the device."""

    positions: Any
    """[rows], of round 0."""
    num_passes: Any
    """[rows]"""
    logits_rows: Any
    """[rows], of the logits that the first draw is made from."""
    parameters: Any
    """[draws, rows, 3], of `row_parameters`."""
    cuts: Any
    """[rows, 5], of `cut_parameters`; no rows where there are none."""
    tables: Any
    """[rows, blocks]"""

    @staticmethod
    def of(state: Any, num_draws: int, num_rows: int, has_cuts: bool) -> _Parts:
        """Of a tensor or an array."""
        ends = list(
            itertools.accumulate(
                (num_rows, num_rows, num_rows, 3 * num_draws * num_rows, NUM_CUT_WORDS * num_rows * has_cuts)
            )
        )
        parts = [state[low:high] for low, high in zip([0, *ends], [*ends, None], strict=True)]
        shapes = ((num_rows,), (num_rows,), (num_rows,), (num_draws, num_rows, 3), (-1, NUM_CUT_WORDS), (num_rows, -1))
        return _Parts(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))


class DeviceDrawing:
    """``Drawing`` on a GPU: every row is computed to the end, and the host drops what would not have been drawn.

    Cost: one copy to the device, four launches, a graph, and one copy back, for which it waits. Where a row has cuts,
    each draw has those launches more that `launch_cuts` has, and its graph is captured when such a row is first met.
    """

    most_rounds = ROUND_BUCKETS[-1]
    most_call_s = 8e-3
    """About two steps of a target that is worth drafting for. Chosen, not measured."""

    def __init__(
        self,
        steps: Replays,
        cache: KVCache,
        vocab_size: int,
        max_len: int,
        sampler: Sampler,
        other_ids: OtherIds | None = None,
    ) -> None:
        """``steps`` are of ``cache``, whose last block is the spare one; ``max_len``: positions of the model.

        With ``other_ids`` the sampler is of those that are drawn, and ``vocab_size`` is how many these are.
        """
        self.num_passes = 0
        self._steps = steps
        self._cache = cache
        self._vocab_size = vocab_size
        self._max_len = max_len
        self._sampler = sampler
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._can_capture = True
        self._mean_used = float(ROUND_BUCKETS[-1])
        self._other_ids = None if other_ids is None else IdTables(other_ids, cache.device, cache.device)

    def by_ids(self, ids: OtherIds) -> DeviceDrawing:
        """See ``Drawing``; torch finds ids that the model does not have. Cost: a copy of the logits of each pass."""
        num_ids = len(ids.columns)
        sampler = Sampler(num_ids, self._sampler.device)
        return DeviceDrawing(self._steps, self._cache, num_ids, self._max_len, sampler, ids)

    def prepare(self, num_top: int) -> None:
        """Capture graphs for few rows and contexts that fit the shortest table, as far as time and memory go."""
        began_s, num_blocks = time.monotonic(), table_bucket(1, self._cache.block_size)
        for num_rows in _PREPARED_ROWS:
            for num_draws in reversed(ROUND_BUCKETS):
                if self._can_capture and self._steps.has_room(time.monotonic() - began_s):
                    self._graph_of((num_rows, num_blocks, num_draws, min(num_top, self._vocab_size), None))

    def draw(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[list[Draw]]:
        """See ``Drawing``."""
        self._check_positions(rows)
        num_top, num_draws = min(num_top, self._vocab_size), max(row.num_rounds for row in rows)
        num_rows = row_bucket(len(rows))
        cuts, kinds = self._cuts(rows)
        graph = None
        if num_draws > 1 and num_rows is not None and num_top <= MOST_TOP:
            num_blocks = table_bucket(max(len(row.block_ids) for row in rows), self._cache.block_size)
            wanted = min(num_draws, math.ceil(_USE_MARGIN * self._mean_used))
            bucket = next((bucket for bucket in ROUND_BUCKETS if bucket >= wanted), ROUND_BUCKETS[-1])
            graph = self._graph_of((num_rows, num_blocks, bucket, num_top, kinds))
        self.num_passes = 0
        if graph is None:
            first = logits[[row.logits_row for row in rows], : self._vocab_size]
            return [[draw] for draw in self._single(rows, first, num_top)]
        self.num_passes = len(graph.drawn) - 1
        parts = self._upload(graph, rows, cuts)
        first = logits.index_select(0, parts.logits_rows[: len(rows)])[:, : self._vocab_size]
        self._launch_draw(graph, first, parts.parameters[0], parts.cuts, graph.drawn[0, : len(rows)])
        graph.replay()
        results = graph.results.cpu()[:, : len(rows)]
        token_ids, scores = read_top(results.reshape(-1, 2, num_top))
        draws = [(token_ids[at : at + num_top], scores[at : at + num_top]) for at in range(0, len(token_ids), num_top)]
        of_rounds = [draws[at : at + len(rows)] for at in range(0, len(draws), len(rows))]
        drawn = _pruned(rows, of_rounds)
        self._mean_used += _USE_WEIGHT * (max(map(len, drawn)) - self._mean_used)
        return drawn

    def _cuts(self, rows: Sequence[DrawRow]) -> tuple[torch.Tensor, CutKinds | None]:
        """Parameters of rows' cuts, and which there are; None where no row has any."""
        temperatures = [_temperature(row) if row.rule.params.has_cuts else 0.0 for row in rows]
        of_rows = [RowContext(row.rule.params, row.position, row.position) for row in rows]
        parameters, kinds = cut_parameters(temperatures, cut_arguments(of_rows), self._vocab_size)
        return parameters, kinds if any(temperatures) else None

    @staticmethod
    def _launch_draw(
        graph: _Graph, logits: torch.Tensor, parameters: torch.Tensor, cuts: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Draw one token of each row of the logits, by as many of the graph's rows."""
        num_rows = len(logits)
        if graph.cuts is not None:
            logits = launch_cuts(logits, cuts[:num_rows], graph.cuts)
        launch_top(logits, parameters[:num_rows], out.shape[2], out)

    def _single(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[Draw]:
        contexts = [RowContext(row.rule.params, row.position, row.position) for row in rows]
        draws: list[Draw] = []
        for found in self._sampler.candidates(logits, contexts, num_top):
            missing = num_top - len(found)
            value = -math.inf if found else math.nan
            ids, scores = [each.token_id for each in found], [each.score for each in found]
            draws.append((ids + [0] * missing, scores + [value] * missing))
        return draws

    def _check_positions(self, rows: Sequence[DrawRow]) -> None:
        for row in rows:
            if row.position + row.num_rounds - 1 > self._max_len:
                raise IndexError(f"position {row.position} and {row.num_rounds - 1} more are out of the model's range")

    def _upload(self, graph: _Graph, rows: Sequence[DrawRow], cuts: torch.Tensor) -> _Parts:
        """Fill a graph's state by one copy; returns its parts on the device."""
        num_draws, num_rows = graph.drawn.shape[:2]
        has_cuts = graph.cuts is not None
        temperatures, keys = np.zeros((num_draws, num_rows), np.float32), np.zeros((num_draws, num_rows, 2), np.int64)
        state = np.zeros(len(graph.state), np.int32)
        parts = _Parts.of(state, num_draws, num_rows, has_cuts)
        parts.tables[:] = self._cache.num_blocks - 1
        for index, row in enumerate(rows):
            params = row.rule.params
            parts.positions[index], parts.num_passes[index] = row.position, min(row.num_rounds, num_draws) - 1
            parts.logits_rows[index] = row.logits_row
            parts.tables[index, : len(row.block_ids)] = row.block_ids
            if params.is_greedy:
                continue
            temperatures[:, index] = 1.0 if params.has_cuts else _temperature(row)
            for number in range(min(row.num_rounds, num_draws)):
                position = row.position + number
                keys[number, index] = noise_key(params.seed, params.choice, Purpose.PLAIN, position)
        parameters = row_parameters(temperatures.reshape(-1).tolist(), keys.reshape(-1).tolist())
        parts.parameters[:] = parameters.numpy().reshape(num_draws, num_rows, 3)
        if has_cuts:
            parts.cuts[: len(rows)] = cuts.numpy()
        graph.state.copy_(torch.from_numpy(state), non_blocking=True)
        return _Parts.of(graph.state, num_draws, num_rows, has_cuts)

    def _graph_of(self, key: Key) -> _Graph | None:
        graph = self._graphs.get(key)
        if graph is None and self._can_capture and self._steps.row_edges:
            try:
                graph = self._captured(key)
            except RuntimeError:
                self._can_capture = False  # what captures has said why
                return None
            self._graphs[key] = graph
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def _captured(self, key: Key) -> _Graph:
        num_rows, width, num_draws, num_top, cuts = key
        cache, device = self._cache, self._cache.device
        spare_block = cache.num_blocks - 1
        batch = empty_batch((num_rows, 1), device, spare_block, cache.block_size)
        batch.row_seq = torch.arange(num_rows, dtype=torch.int32, device=device)
        words_per_row = 3 + 3 * num_draws + (NUM_CUT_WORDS if cuts is not None else 0) + width
        state = torch.zeros(num_rows * words_per_row, dtype=torch.int32, device=device)
        parts = _Parts.of(state, num_draws, num_rows, cuts is not None)
        batch.block_tables = parts.tables
        batch.block_tables.fill_(spare_block)
        drawn = torch.zeros(num_draws, num_rows, 2, num_top, dtype=torch.int32, device=device)
        graph = _Graph(state, cuts, drawn, lambda: None, drawn)
        graph.replay, graph.results = self._steps.capture(lambda: self._rounds(graph, batch, parts))
        return graph

    def _rounds(self, graph: _Graph, batch: Batch, parts: _Parts) -> torch.Tensor:
        """Compute what was drawn and draw again, to the end."""
        for number in range(len(graph.drawn) - 1):
            advance(batch, number, graph.drawn[number], parts.positions, parts.num_passes, self._cache)
            if self._other_ids is not None:
                batch.input_ids.copy_(self._other_ids.model_ids(batch.input_ids))
            logits = self._steps.forward(batch, self._cache)
            if self._other_ids is not None:
                logits = self._other_ids.by_drawn_id(logits)
            logits = logits[:, : self._vocab_size]
            self._launch_draw(graph, logits, parts.parameters[number + 1], parts.cuts, graph.drawn[number + 1])
        return graph.drawn


def _temperature(row: DrawRow) -> float:
    """Of a row that is not greedy."""
    return max(row.rule.params.temperature, MIN_TEMPERATURE)


def _pruned(rows: Sequence[DrawRow], of_rounds: Sequence[Sequence[Draw]]) -> list[list[Draw]]:
    """What rounds would have drawn that end where ``DrawRow`` says so: the same as ``native/ahead.cpp`` draws."""
    drawn: list[list[Draw]] = [[] for _ in rows]
    path_scores = [row.path_score for row in rows]
    active = list(range(len(rows)))
    for number, draws in enumerate(of_rounds):
        goes_on, rest = True, []
        for r in active:
            row, (token_ids, scores) = rows[r], draws[r]
            drawn[r].append(draws[r])
            is_end = math.isnan(scores[0])
            if not is_end:
                shares = [math.exp(score - scores[0]) for score in scores]
                total = sum(shares)
                if len(shares) > 1 and path_scores[r] * (shares[1] / total) >= row.least_fork_score:
                    goes_on = False
                path_scores[r] /= total
                is_end = (
                    number + 1 >= row.num_rounds
                    or path_scores[r] < row.least_path_score
                    or token_ids[0] in row.rule.ends
                )
            if is_end:
                goes_on = goes_on and not row.ends_all
            else:
                rest.append(r)
        if not goes_on or not rest:
            break
        active = rest
    return drawn
