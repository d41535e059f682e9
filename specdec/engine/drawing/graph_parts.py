"""What a call of a captured graph uploads, in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.engine.cuda.buckets import PassShape
from specdec.engine.cuda.cuts import NUM_CUT_NUMBERS
from specdec.engine.drawing.rows import DrawRow
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE
from specdec.engine.sampling.noise import Purpose, noise_key, uniform

Layout = np.dtype[np.void]


def call_layout(num_draws: int, num_rows: int, num_blocks: int) -> Layout:
    """Parts of a call whose tables have `num_blocks` blocks; only the last part depends on their number."""
    return np.dtype(
        [
            # Of each pass's tokens, and that the pass writes: 0 and in the spare block for a row that has ended.
            ("positions", np.int64, (num_draws - 1, num_rows)),
            ("slots", np.int64, (num_draws - 1, num_rows)),
            # Rows of the logits for the first draw.
            ("logits_rows", np.int64, (num_rows,)),
            # From `cut_parameters`.
            ("cuts", np.float64, (num_rows, NUM_CUT_NUMBERS)),
            # As `launch_top` or `launch_sparse` takes them, by draw.
            ("parameters", np.int32, (num_draws, num_rows, 3)),
            ("tables", np.int32, (num_rows, num_blocks)),
        ]
    )


def call_parts(words: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Views of the parts of a call, which are the first of these int32 words."""
    parts = {}
    for name, (kind, offset, *_) in (layout.fields or {}).items():
        dtype = torch.from_numpy(np.empty(0, kind.base)).dtype
        parts[name] = words[offset // 4 : (offset + kind.itemsize) // 4].view(dtype).view(kind.shape)
    return parts


def packed_call(
    rows: Sequence[DrawRow], layout: Layout, cuts: torch.Tensor, shape: PassShape, *, is_sparse: bool
) -> torch.Tensor:
    """The words of a call, int32 on the host.

    Args:
        rows: rows of the call.
        layout: from `call_layout`.
        cuts: from `cut_parameters`, of the call's rows.
        shape: of the graph's passes; rows that have ended, and rows past the call's, have its spare block.
        is_sparse: whether the draws are `launch_sparse`'s.
    """
    call = np.zeros(1, layout)
    positions, slots, parameters, tables = (call[name][0] for name in ("positions", "slots", "parameters", "tables"))
    slots[:], tables[:] = shape.spare_slot, shape.spare_block
    call["cuts"][0, : len(rows)] = cuts.numpy()
    for index, row in enumerate(rows):
        own = tables[index, : len(row.block_ids)]
        own[:] = row.block_ids
        at = row.position + np.arange(min(row.num_rounds, len(parameters)) - 1)
        positions[: len(at), index] = at
        blocks, offsets = np.divmod(at, shape.block_size)
        slots[: len(at), index] = own[blocks].astype(np.int64) * shape.block_size + offsets
        call["logits_rows"][0, index] = row.logits_row
        params = row.rule.params
        if params.is_greedy:
            continue
        temperature = 1.0 if params.has_cuts else scaling_of(row)
        parameters[:, index, 2] = np.array(temperature, np.float32).view(np.int32)
        seed, choice, drawn_at = params.seed, params.choice, range(row.position, row.position + len(at) + 1)
        if is_sparse:
            words = np.array([uniform(seed, choice, Purpose.DRAFT, each, row.chain) for each in drawn_at])
        else:
            words = np.array([noise_key(seed, choice, Purpose.PLAIN, each) for each in drawn_at], np.uint32)
        parameters[: len(drawn_at), index, :2] = words.view(np.int32).reshape(-1, 2)
    return torch.from_numpy(call.view(np.int32))


def scaling_of(row: DrawRow) -> float:
    """The temperature of a row that is not greedy."""
    return max(row.rule.params.temperature, MIN_TEMPERATURE)
