"""What a call of a captured graph of draws uploads: one packed copy, and another where logits are adjusted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.batch import to_device
from specdec.engine.cuda.buckets import PassShape
from specdec.engine.drawing.rows import DrawRow
from specdec.engine.sampling.logit_processors import (
    RowContext,
    biased_tokens,
    counted_tokens,
    held_tokens,
    named_tokens,
    penalized,
    penalties_of,
)
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
            # From `row_numbers`.
            ("numbers", np.float64, (num_rows, 5)),
            # By draw, two u32 of noise or the bits of a float64 random number; zeros for a greedy row.
            ("keys", np.int32, (num_draws, num_rows, 2)),
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
    rows: Sequence[DrawRow], layout: Layout, numbers: npt.NDArray[np.float64], shape: PassShape, *, is_sparse: bool
) -> torch.Tensor:
    """The words of a call, int32 on the host.

    Args:
        layout: from `call_layout`.
        numbers: from `row_numbers`, of the call's rows.
        shape: of the graph's passes; rows that have ended, and rows past the call's, have its spare block.
        is_sparse: whether the draws are `draw_sparse`'s.
    """
    call = np.zeros(1, layout)
    positions, slots, keys, tables = (call[name][0] for name in ("positions", "slots", "keys", "tables"))
    slots[:], tables[:] = shape.spare_slot, shape.spare_block
    call["numbers"][0, : len(rows)] = numbers
    for index, row in enumerate(rows):
        own = tables[index, : len(row.block_ids)]
        own[:] = row.block_ids
        at = row.position + np.arange(min(row.num_rounds, len(keys)) - 1)
        positions[: len(at), index] = at
        blocks, offsets = np.divmod(at, shape.block_size)
        slots[: len(at), index] = own[blocks].astype(np.int64) * shape.block_size + offsets
        call["logits_rows"][0, index] = row.logits_row
        params = row.rule.params
        if params.is_greedy:
            continue
        seed, choice, drawn_at = params.seed, params.choice, range(row.position, row.position + len(at) + 1)
        if is_sparse:
            words = np.array([uniform(seed, choice, Purpose.DRAFT, each, row.chain) for each in drawn_at])
        else:
            words = np.array([noise_key(seed, choice, Purpose.PLAIN, each) for each in drawn_at], np.uint32)
        keys[: len(drawn_at), index] = words.view(np.int32).reshape(-1, 2)
    return torch.from_numpy(call.view(np.int32))


class Adjustments:
    """Bias, penalties, min_tokens and allowed tokens of rows for all draws of a call, in tensors with fixed addresses.

    Bad words are not supported: the tokens that they forbid depend on earlier tokens, and on whether others remain.

    Guarantee: finite logits become those of ``adjusted_logits``, bit for bit, for the rows' tokens at `fill` and those
    counted since; a row that is not finite stays so. No operation waits for data.

    Memory: twelve bytes for each row and token of the vocabulary.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Begin with rows without adjustments."""
        self._penalties = torch.ones(num_rows, 1, 3, device=device)
        self._counts, self._held = torch.zeros(2, num_rows, vocab_size, dtype=torch.int32, device=device).unbind(0)
        self._biases = torch.zeros(num_rows, vocab_size, device=device)
        self._firsts = torch.arange(0, num_rows * vocab_size, vocab_size, device=device)

    def fill(self, contexts: Sequence[RowContext]) -> None:
        """Set the first rows' adjustments at their positions; the other rows get none.

        Cost: a copy to the device of 12 bytes for each token that a row's parameters or history name, and passes over
        all rows and tokens.

        Raises:
            ValueError: a row with penalties has no history, or one whose length contradicts its position.
        """
        vocab_size, tables = self._biases.shape[1], (self._counts, self._held, self._biases)
        named = [each(contexts, vocab_size) for each in (counted_tokens, held_tokens, biased_tokens)]
        restricted = [(r, ids) for r, row in enumerate(contexts) if (ids := row.params.allowed_ids)]
        allowed, _ = named_tokens([(r, ids, ids) for r, ids in restricted], vocab_size, "q")
        (*places, allowed_at), (*values, penalties) = to_device(
            [*(at for at, _ in named), allowed],
            [*(of_token.view(np.int32) for _, of_token in named), penalties_of(contexts).reshape(-1).view(np.int32)],
            self._biases.device,
        )
        for table in tables:
            table.zero_()
        for row, _ in restricted:
            self._biases[row].fill_(-math.inf)
        self._biases.view(-1).index_fill_(0, allowed_at, 0.0)
        for table, at, value in zip(tables, places, values, strict=True):
            table.view(-1).index_add_(0, at, value.view(table.dtype))
        self._penalties[: len(contexts), 0] = penalties.view(torch.float32).view(-1, 3)

    def count(self, token_ids: torch.Tensor) -> None:
        """Count a drawn token ``[rows]`` int64 of each of the first rows as output. Five small operations."""
        counts, places = self._counts.view(-1), self._firsts[: len(token_ids)] + token_ids
        counts.index_copy_(0, places, counts.index_select(0, places).clamp_(min=1).add_(1))

    def adjusted(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        """Adjusted copy of the first R rows' logits ``[R, V]`` float32 for draw ``number``, from 0 on.

        Cost: 21 of torch's operations, about 3 percent of a pass of a 1B model.
        """
        num_rows = len(logits)
        counts, held, biases = self._counts[:num_rows], self._held[:num_rows], self._biases[:num_rows]
        adjusted = penalized(logits + biases, counts, self._penalties[:num_rows])
        return adjusted.masked_fill_((held > number) & (adjusted < math.inf), -math.inf)
