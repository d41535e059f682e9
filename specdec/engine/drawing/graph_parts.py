"""The parameters that a call of a captured graph uploads in one copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.engine.cuda.cuts import NUM_CUT_WORDS
from specdec.engine.cuda.sampling import row_parameters
from specdec.engine.drawing.rows import DrawRow
from specdec.engine.drawing.sparse import sparse_rows
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE
from specdec.engine.sampling.noise import Purpose, noise_key, uniform


class GraphParts(NamedTuple):
    """Views of a graph's state, on the host or on the device."""

    positions: Any
    """[rows], positions of the tokens of round 0."""
    num_passes: Any
    """[rows], number of each row's passes."""
    logits_rows: Any
    """[rows], rows of the logits for the first draw."""
    parameters: Any
    """[draws, rows, 3], from `row_parameters` or `sparse_rows`."""
    cuts: Any
    """[rows, 5], from `cut_parameters`; [0, 5] in a graph without cuts."""
    tables: Any
    """[rows, blocks], block tables, as wide as a call's."""

    @staticmethod
    def size(num_draws: int, num_rows: int, width: int, *, has_cuts: bool) -> int:
        """Number of words of a state whose tables have `width` blocks."""
        return num_rows * (3 + 3 * num_draws + NUM_CUT_WORDS * has_cuts + width)

    @staticmethod
    def of(state: Any, num_draws: int, num_rows: int, has_cuts: bool) -> GraphParts:
        """The parts of a graph's state, a one-dimensional int32 tensor or array."""
        ends = list(
            itertools.accumulate(
                (num_rows, num_rows, num_rows, 3 * num_draws * num_rows, NUM_CUT_WORDS * num_rows * has_cuts)
            )
        )
        parts = [state[low:high] for low, high in zip([0, *ends], [*ends, None], strict=True)]
        shapes = ((num_rows,), (num_rows,), (num_rows,), (num_draws, num_rows, 3), (-1, NUM_CUT_WORDS), (num_rows, -1))
        return GraphParts(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))


def scaling_of(row: DrawRow) -> float:
    """The temperature of a row that is not greedy."""
    return max(row.rule.params.temperature, MIN_TEMPERATURE)


def parameters_of(rows: Sequence[DrawRow], num_draws: int, num_rows: int) -> npt.NDArray[np.int32]:
    """Parameters of each draw of each row, ``[num_draws, num_rows, 3]`` int32, as ``launch_top`` takes them."""
    temperatures, keys = np.zeros((num_draws, num_rows), np.float32), np.zeros((num_draws, num_rows, 2), np.int64)
    for index, row in enumerate(rows):
        params = row.rule.params
        if params.is_greedy:
            continue
        temperatures[:, index] = 1.0 if params.has_cuts else scaling_of(row)
        for number in range(min(row.num_rounds, num_draws)):
            keys[number, index] = noise_key(params.seed, params.choice, Purpose.PLAIN, row.position + number)
    words = row_parameters(temperatures.reshape(-1).tolist(), keys.reshape(-1).tolist())
    return words.numpy().reshape(num_draws, num_rows, 3)


def sparse_parameters_of(rows: Sequence[DrawRow], num_draws: int, num_rows: int) -> npt.NDArray[np.int32]:
    """Parameters of each draw of each row, ``[num_draws, num_rows, 3]`` int32, as ``launch_sparse`` takes them."""
    temperatures, numbers = np.zeros((num_draws, num_rows), np.float32), np.zeros((num_draws, num_rows))
    for index, row in enumerate(rows):
        params = row.rule.params
        temperatures[:, index] = 0.0 if params.is_greedy else scaling_of(row)
        for number in range(num_draws):
            position = row.position + number
            numbers[number, index] = uniform(params.seed, params.choice, Purpose.DRAFT, position, row.chain)
    return sparse_rows(temperatures.reshape(-1), numbers.reshape(-1)).reshape(num_draws, num_rows, 3)
