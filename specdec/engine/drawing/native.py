"""Draws several tokens of each row in one native call: draw, compute the drawn tokens, draw again
(``native/ahead.cpp``)."""

import ctypes
from array import array
from collections.abc import Sequence

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.drawing.rows import Draw, Drawing, DrawRow, DrawRule, NativeRow, OtherIds
from specdec.engine.model.fused import FusedDecoder

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Call(ctypes.Structure):
    """``AheadCall`` of ahead.cpp."""

    _fields_ = [
        *((name, _INT64) for name in ("num_rows", "num_top", "max_rounds", "vocab_size", "num_logits", "block_size")),
        *((name, _POINTER) for name in ("rows", "first_logits")),
        ("first_stride", _INT64),
        *((name, _POINTER) for name in ("token_ids", "scores", "num_drawn", "inputs", "columns")),
    ]


class DrawingDecoder(Drawing):
    """``Drawing`` on a CPU: draws from logits and computes the drawn tokens, round by round, in one native call."""

    most_rounds = 4
    most_call_s = 1e-3
    ends_at_forks = True

    def __init__(
        self, decoder: FusedDecoder, cache: KVCache, vocab_size: int, other_ids: OtherIds | None = None
    ) -> None:
        """`vocab_size`: ids from here on are never drawn; with `other_ids`, the number of their columns replaces it.

        Raises ``ValueError``: `other_ids` map to ids that the decoder does not have.
        """
        self._decoder = decoder
        self._cache = cache
        self._vocab_size = vocab_size
        self._other_ids: tuple[array[int], array[int]] | None = None
        if other_ids is not None:
            other_ids.check(decoder.num_logits)
            self._vocab_size = len(other_ids.columns)
            self._other_ids = array("i", other_ids.inputs), array("i", other_ids.columns)
        self._logits = torch.empty(0, decoder.num_logits)
        self._function = decoder.library.specdec_decoder_ahead

    def takes(self, rule: DrawRule) -> bool:
        """See ``Drawing``: it takes rules that adjust no logits."""
        return not rule.params.adjusts_logits

    def draw(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[list[Draw]]:
        """See ``Drawing``. ``logits`` must be contiguous."""
        num_rows, max_rounds = len(rows), max(row.num_rounds for row in rows)
        table = (NativeRow * num_rows)()
        for index, row in enumerate(rows):
            if not self.takes(row.rule):
                raise ValueError("bias, penalties and the like adjust logits before anything is drawn")
            table[index] = row.rule.row
            entry = table[index]
            entry.logits_row, entry.position, entry.num_rounds = row.logits_row, row.position, row.num_rounds
            entry.blocks, entry.num_blocks = row.block_ids.buffer_info()
            entry.path_score, entry.least_path_score = row.path_score, row.least_path_score
            entry.least_fork_score, entry.ends_all = row.least_fork_score, row.ends_all
        num_top = min(num_top, self._vocab_size)
        token_ids = (_INT64 * (num_rows * max_rounds * num_top))()
        scores = (ctypes.c_float * (num_rows * max_rounds * num_top))()
        num_drawn = (_INT64 * num_rows)()
        if len(self._logits) < num_rows:
            self._logits = torch.empty(num_rows, self._decoder.num_logits)
        logits = logits.contiguous()
        call = _Call(
            num_rows,
            num_top,
            max_rounds,
            self._vocab_size,
            self._decoder.num_logits,
            self._cache.block_size,
            ctypes.addressof(table),
            logits.data_ptr(),
            logits.shape[1],
            ctypes.addressof(token_ids),
            ctypes.addressof(scores),
            ctypes.addressof(num_drawn),
            *(() if self._other_ids is None else (each.buffer_info()[0] for each in self._other_ids)),
        )
        self._decoder.call(self._function, call, num_rows, self._cache, self._logits)
        self.num_passes = max(num_drawn) - 1
        drawn: list[list[Draw]] = []
        for index in range(num_rows):
            first = index * max_rounds * num_top
            ends = range(first + num_top, first + num_drawn[index] * num_top + 1, num_top)
            drawn.append([(token_ids[end - num_top : end], scores[end - num_top : end]) for end in ends])
        return drawn

    def by_ids(self, ids: OtherIds) -> "DrawingDecoder":
        """See ``Drawing``. Cost: a pass over a row of logits for each drawn token but the first of a call."""
        return DrawingDecoder(self._decoder, self._cache, self._vocab_size, ids)
