"""What a call of a captured graph uploads, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.batch import unpacked
from specdec.engine.cuda.buckets import PassShape
from specdec.engine.cuda.cuts import NUM_CUT_NUMBERS
from specdec.engine.drawing.rows import DrawRow
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE
from specdec.engine.sampling.noise import Purpose, noise_key, uniform


class GraphParts(NamedTuple):
    """Views of a packed call, on the device."""

    positions: torch.Tensor
    """[passes, rows] int64, of each pass's tokens; 0 for a row that has ended."""
    slots: torch.Tensor
    """[passes, rows] int64, that these passes write; in the spare block for a row that has ended."""
    logits_rows: torch.Tensor
    """[rows] int64, rows of the logits for the first draw."""
    cuts: torch.Tensor
    """[rows, 4] float64, from `cut_parameters`."""
    parameters: torch.Tensor
    """[draws, rows, 3] int32, as `launch_top` or `launch_sparse` takes them."""
    tables: torch.Tensor
    """[rows, blocks] int32, block tables, as wide as a call's."""

    @staticmethod
    def size(num_draws: int, num_rows: int, width: int) -> int:
        """Number of words of a packed call whose tables have `width` blocks."""
        return num_rows * (4 * (num_draws - 1) + 2 + 2 * NUM_CUT_NUMBERS + 3 * num_draws + width)

    @staticmethod
    def of(packed: torch.Tensor, num_draws: int, num_rows: int) -> GraphParts:
        """The parts of a call that `packed_call` has made."""
        of_passes, of_draws = (num_draws - 1) * num_rows, 3 * num_draws * num_rows
        rest = len(packed) - GraphParts.size(num_draws, num_rows, 0)
        (positions, slots, logits_rows, cuts), (parameters, tables) = unpacked(
            packed, [of_passes, of_passes, num_rows, NUM_CUT_NUMBERS * num_rows], [of_draws, rest]
        )
        return GraphParts(
            positions.view(-1, num_rows),
            slots.view(-1, num_rows),
            logits_rows,
            cuts.view(torch.float64).view(num_rows, NUM_CUT_NUMBERS),
            parameters.view(num_draws, num_rows, 3),
            tables.view(num_rows, -1),
        )


def packed_call(
    rows: Sequence[DrawRow],
    num_draws: int,
    num_rows: int,
    cuts: torch.Tensor,
    shape: PassShape,
    *,
    is_sparse: bool,
) -> torch.Tensor:
    """The words of a call, int32 on the host.

    Args:
        rows: rows of the call.
        num_draws: draws of the graph.
        num_rows: rows of the graph.
        cuts: from `cut_parameters`, of the call's rows.
        shape: of the graph's passes; rows that have ended, and rows past the call's, have its spare block.
        is_sparse: whether the draws are `launch_sparse`'s.
    """
    positions = np.zeros((num_draws - 1, num_rows), np.int64)
    slots = np.full_like(positions, shape.spare_slot)
    logits_rows, numbers = np.zeros(num_rows, np.int64), np.zeros((num_rows, NUM_CUT_NUMBERS))
    parameters = np.zeros((num_draws, num_rows, 3), np.uint32)
    tables = np.full((num_rows, max(len(row.block_ids) for row in rows)), shape.spare_block, np.int32)
    numbers[: len(rows)] = cuts.numpy()
    for index, row in enumerate(rows):
        own = tables[index, : len(row.block_ids)]
        own[:] = row.block_ids
        at = row.position + np.arange(min(row.num_rounds, num_draws) - 1)
        positions[: len(at), index] = at
        blocks, offsets = np.divmod(at, shape.block_size)
        slots[: len(at), index] = own[blocks].astype(np.int64) * shape.block_size + offsets
        logits_rows[index] = row.logits_row
        params = row.rule.params
        if params.is_greedy:
            continue
        temperature = 1.0 if params.has_cuts else scaling_of(row)
        parameters[:, index, 2] = np.array(temperature, np.float32).view(np.uint32)
        for number in range(min(row.num_rounds, num_draws)):
            position = row.position + number
            parameters[number, index, :2] = (
                _words(uniform(params.seed, params.choice, Purpose.DRAFT, position, row.chain))
                if is_sparse
                else noise_key(params.seed, params.choice, Purpose.PLAIN, position)
            )
    parts = (positions, slots, logits_rows, numbers, parameters, tables)
    return torch.from_numpy(np.concatenate([each.view(np.int32).reshape(-1) for each in parts]))


def scaling_of(row: DrawRow) -> float:
    """The temperature of a row that is not greedy."""
    return max(row.rule.params.temperature, MIN_TEMPERATURE)


def _words(number: float) -> npt.NDArray[np.uint32]:
    return np.array([number], np.float64).view(np.uint32)
