"""Several tokens of each row in one captured graph: draw, compute what was drawn, draw again, without the host."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.buckets import advance, empty_batch, row_bucket, table_bucket
from specdec.engine.cuda.sampling import MOST_TOP, launch_top, read_top, row_parameters
from specdec.engine.drawing.rows import Draw, DrawRow
from specdec.engine.model.device_choice import Replays
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE, RowContext
from specdec.engine.sampling.noise import Purpose, noise_key
from specdec.engine.sampling.sampler import Sampler

ROUND_BUCKETS = (2, 4, 8)
"""Draws of a graph; the first one is made before it, from logits that are there."""
_USE_WEIGHT = 0.1
"""Of one call in the mean of how many of its draws were of use."""
_USE_MARGIN = 1.5
"""A graph has so many times the draws that were of use on average. Chosen, not measured."""
_PREPARED_ROWS = (8, 4, 2, 1)
_MOST_PREPARE_S = 10.0
_MOST_GRAPHS = 64

Key = tuple[int, int, int, int]
"""Rows, blocks of a table, draws, and tokens per draw."""


@dataclass(slots=True)
class _Graph:
    state: torch.Tensor
    """All that a call uploads, int32: positions [rows], passes [rows], parameters [draws, rows, 3], tables."""
    drawn: torch.Tensor
    """[draws, rows, 2, num_top] int32, of which the caller fills the first."""
    replay: Callable[[], None]
    results: torch.Tensor
    """What a replay fills; the same as `drawn` on a device."""


class DeviceDrawing:
    """``Drawing`` on a GPU: every row is computed to the end, and the host drops what would not have been drawn.

    Cost: one copy to the device, four launches, a graph, and one copy back, for which it waits. Rows with cuts have
    one draw a call, as their logits are sorted.
    """

    most_rounds = ROUND_BUCKETS[-1]
    most_call_s = 8e-3
    """About two steps of a target that is worth drafting for. Chosen, not measured."""

    def __init__(self, steps: Replays, cache: KVCache, vocab_size: int, max_len: int, sampler: Sampler) -> None:
        """``steps`` are of ``cache``, whose last block is the spare one; ``max_len``: positions of the model."""
        self.num_passes = 0
        self._steps = steps
        self._cache = cache
        self._vocab_size = vocab_size
        self._max_len = max_len
        self._sampler = sampler
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._can_capture = True
        self._mean_used = float(ROUND_BUCKETS[-1])

    def prepare(self, num_top: int) -> None:
        """Capture graphs for few rows and contexts that fit the shortest table, within 10 s."""
        end_s, num_blocks = time.monotonic() + _MOST_PREPARE_S, table_bucket(1, self._cache.block_size)
        for num_rows in _PREPARED_ROWS:
            for num_draws in reversed(ROUND_BUCKETS):
                if time.monotonic() < end_s and self._can_capture:
                    self._graph_of((num_rows, num_blocks, num_draws, min(num_top, self._vocab_size)))

    def draw(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[list[Draw]]:
        """See ``Drawing``."""
        self._check_positions(rows)
        num_top, num_draws = min(num_top, self._vocab_size), max(row.num_rounds for row in rows)
        num_rows = row_bucket(len(rows))
        is_simple = num_top <= MOST_TOP and not any(row.rule.params.has_cuts for row in rows)
        graph = None
        if num_draws > 1 and num_rows is not None and is_simple:
            num_blocks = table_bucket(max(len(row.block_ids) for row in rows), self._cache.block_size)
            wanted = min(num_draws, math.ceil(_USE_MARGIN * self._mean_used))
            bucket = next((bucket for bucket in ROUND_BUCKETS if bucket >= wanted), ROUND_BUCKETS[-1])
            graph = self._graph_of((num_rows, num_blocks, bucket, num_top))
        self.num_passes = 0
        first = logits[[row.logits_row for row in rows], : self._vocab_size]
        if graph is None:
            return [[draw] for draw in self._single(rows, first, num_top)]
        self.num_passes = len(graph.drawn) - 1
        self._upload(graph, rows)
        launch_top(first, self._parameters(graph, 0)[: len(rows)], num_top, graph.drawn[0, : len(rows)])
        graph.replay()
        results = graph.results.cpu()[:, : len(rows)]
        token_ids, scores = read_top(results.reshape(-1, 2, num_top))
        draws = [(token_ids[at : at + num_top], scores[at : at + num_top]) for at in range(0, len(token_ids), num_top)]
        of_rounds = [draws[at : at + len(rows)] for at in range(0, len(draws), len(rows))]
        drawn = _pruned(rows, of_rounds)
        self._mean_used += _USE_WEIGHT * (max(map(len, drawn)) - self._mean_used)
        return drawn

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

    def _upload(self, graph: _Graph, rows: Sequence[DrawRow]) -> None:
        num_draws, num_rows = graph.drawn.shape[:2]
        width = (len(graph.state) - 2 * num_rows - 3 * num_draws * num_rows) // num_rows
        temperatures, keys = np.zeros((num_draws, num_rows), np.float32), np.zeros((num_draws, num_rows, 2), np.int64)
        state = np.zeros(len(graph.state), np.int32)
        tables = state[-num_rows * width :].reshape(num_rows, width)
        tables[:] = self._cache.num_blocks - 1
        for index, row in enumerate(rows):
            params = row.rule.params
            state[index], state[num_rows + index] = row.position, min(row.num_rounds, num_draws) - 1
            tables[index, : len(row.block_ids)] = row.block_ids
            if params.is_greedy:
                continue
            temperatures[:, index] = max(params.temperature, MIN_TEMPERATURE)
            for number in range(min(row.num_rounds, num_draws)):
                position = row.position + number
                keys[number, index] = noise_key(params.seed, params.choice, Purpose.PLAIN, position)
        parameters = row_parameters(temperatures.reshape(-1).tolist(), keys.reshape(-1).tolist())
        state[2 * num_rows : 2 * num_rows + parameters.numel()] = parameters.numpy().reshape(-1)
        graph.state.copy_(torch.from_numpy(state), non_blocking=True)

    def _parameters(self, graph: _Graph, number: int) -> torch.Tensor:
        num_rows = graph.drawn.shape[1]
        at = 2 * num_rows + 3 * num_rows * number
        return graph.state[at : at + 3 * num_rows].view(num_rows, 3)

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
        num_rows, width, num_draws, num_top = key
        cache, device = self._cache, self._cache.device
        spare_block = cache.num_blocks - 1
        batch = empty_batch((num_rows, 1), device, spare_block, cache.block_size)
        batch.row_seq = torch.arange(num_rows, dtype=torch.int32, device=device)
        num_parameters = 3 * num_draws * num_rows
        state = torch.zeros(2 * num_rows + num_parameters + num_rows * width, dtype=torch.int32, device=device)
        batch.block_tables = state[2 * num_rows + num_parameters :].view(num_rows, width)
        batch.block_tables.fill_(spare_block)
        drawn = torch.zeros(num_draws, num_rows, 2, num_top, dtype=torch.int32, device=device)
        graph = _Graph(state, drawn, lambda: None, drawn)
        graph.replay, graph.results = self._steps.capture(lambda: self._rounds(graph, batch))
        return graph

    def _rounds(self, graph: _Graph, batch: Batch) -> torch.Tensor:
        """Compute what was drawn and draw again, to the end."""
        num_draws, num_rows, _, num_top = graph.drawn.shape
        positions, num_passes = graph.state[: 2 * num_rows].view(2, num_rows)
        for number in range(num_draws - 1):
            advance(batch, number, graph.drawn[number], positions, num_passes, self._cache)
            logits = self._steps.forward(batch, self._cache)[:, : self._vocab_size]
            launch_top(logits, self._parameters(graph, number + 1), num_top, graph.drawn[number + 1])
        return graph.drawn


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
