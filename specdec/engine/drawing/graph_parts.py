"""What a call of a captured graph uploads in one copy."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from specdec.engine.cuda.cuts import NUM_CUT_WORDS


class GraphParts(NamedTuple):
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
    def of(state: Any, num_draws: int, num_rows: int, has_cuts: bool) -> GraphParts:
        """Of a tensor or an array."""
        ends = list(
            itertools.accumulate(
                (num_rows, num_rows, num_rows, 3 * num_draws * num_rows, NUM_CUT_WORDS * num_rows * has_cuts)
            )
        )
        parts = [state[low:high] for low, high in zip([0, *ends], [*ends, None], strict=True)]
        shapes = ((num_rows,), (num_rows,), (num_rows,), (num_draws, num_rows, 3), (-1, NUM_CUT_WORDS), (num_rows, -1))
        return GraphParts(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))
