"""Several tokens of each row in one native call: draw, compute what was drawn, draw again (``native/ahead.cpp``)."""

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.model.fused import FusedDecoder
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE
from specdec.sampling_params import SamplingParams

_INT64, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p

Draw = tuple[list[int], list[float]]
"""Best tokens with their scores, as ``NativeSampling.perturbed_top`` returns them of one row."""


class _Row(ctypes.Structure):
    """``AheadRow`` of ahead.cpp."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("choice", _INT64),
        ("ends", _POINTER),
        *((name, _INT64) for name in ("num_ends", "has_cuts", "top_k")),
        ("top_p", _DOUBLE),
        ("min_score", _DOUBLE),
        ("temperature", ctypes.c_float),
        *((name, _INT64) for name in ("logits_row", "position", "num_rounds")),
        ("blocks", _POINTER),
        ("num_blocks", _INT64),
        *((name, _DOUBLE) for name in ("path_score", "least_path_score", "least_fork_score")),
        ("ends_all", _INT64),
    ]


class _Call(ctypes.Structure):
    """``AheadCall`` of ahead.cpp."""

    _fields_ = [
        *((name, _INT64) for name in ("num_rows", "num_top", "max_rounds", "vocab_size", "num_logits", "block_size")),
        *((name, _POINTER) for name in ("rows", "first_logits", "token_ids", "scores", "num_drawn")),
    ]


class DrawRule:
    """How the tokens of a choice are drawn, where their logits need no adjusting."""

    def __init__(self, params: SamplingParams) -> None:
        """Raises ``ValueError`` for parameters that adjust logits: those depend on more than a position."""
        if params.adjusts_logits:
            raise ValueError("bias, penalties and min_tokens adjust logits before anything is drawn")
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)}
        self._ends = array("q", sorted(ends))
        self.row = _Row(
            seed=params.seed,
            choice=params.choice,
            ends=self._ends.buffer_info()[0],
            num_ends=len(self._ends),
            has_cuts=params.has_cuts,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_score=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            temperature=0.0 if params.is_greedy else max(params.temperature, MIN_TEMPERATURE),
        )


@dataclass(slots=True)
class DrawRow:
    """One sequence's part of a call."""

    rule: DrawRule
    logits_row: int
    """Which row of the logits follows its tokens."""
    position: int
    """Number of its tokens: the position of the first one drawn."""
    num_rounds: int
    """Most tokens to draw. All but the last may be computed: ``block_ids`` covers their slots, from ``position`` on."""
    block_ids: "array[int]"
    """Its block table; not to be resized during the call."""
    path_score: float = 1.0
    """Times the score of each token drawn, as a share of those of its draw; below ``least_path_score`` it ends."""
    least_path_score: float = 0.0
    least_fork_score: float = math.inf
    """A second best token that makes this path score ends the rounds of all rows."""
    ends_all: bool = False
    """The end of this row ends the rounds of all."""


class DrawingDecoder:
    """Draws from logits and computes what it has drawn, round by round."""

    def __init__(self, decoder: FusedDecoder, cache: KVCache, vocab_size: int) -> None:
        self._decoder = decoder
        self._cache = cache
        self._vocab_size = vocab_size
        self._logits = torch.empty(0, decoder.num_logits)
        self._function = decoder.library.specdec_decoder_ahead

    def draw(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[list[Draw]]:
        """What is drawn for each row, one draw or more: a row ends early where nothing would follow a token.

        Each draw is what the sampler draws at that position from what a step computes there, bit for bit. Writes the
        keys and values of every token drawn but a row's last into the slots from the row's position on; the caller
        must own these.

        Args:
            rows: at least one, in any order.
            logits: [R, num_logits] float32, contiguous, as the last step of this runner gave them.
            num_top: tokens per draw, at most the vocabulary.

        Raises:
            IndexError: a position is out of the model's range.
        """
        num_rows, max_rounds = len(rows), max(row.num_rounds for row in rows)
        table = (_Row * num_rows)()
        for index, row in enumerate(rows):
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
            ctypes.addressof(token_ids),
            ctypes.addressof(scores),
            ctypes.addressof(num_drawn),
        )
        self._decoder.call(self._function, call, num_rows, self._cache, self._logits)
        drawn: list[list[Draw]] = []
        for index in range(num_rows):
            first = index * max_rounds * num_top
            ends = range(first + num_top, first + num_drawn[index] * num_top + 1, num_top)
            drawn.append([(token_ids[end - num_top : end], scores[end - num_top : end]) for end in ends])
        return drawn
