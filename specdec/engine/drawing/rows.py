"""Arguments of a call that draws several tokens of each row, and the protocol of what makes it."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE, RowContext
from specdec.engine.sampling.rejection import DraftSample
from specdec.wire.sampling_params import SamplingParams

_INT64, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
Draw = tuple[list[int], list[float]]
"""Best tokens with their scores, as ``NativeSampling.perturbed_top`` returns them for one row."""


@dataclass(frozen=True, slots=True)
class OtherIds:
    """Token ids that replace a model's own in drawing: noise, cuts, ends and ties use them."""

    inputs: Sequence[int]
    """[num_ids], the model's id for each id."""
    columns: Sequence[int]
    """[number of drawn ids], for each of the first ids the model's id whose logit it takes; -1: it is never drawn."""

    def check(self, num_logits: int) -> None:
        """Raises ``ValueError``: an id maps to none of the model's `num_logits` ids, or ``columns`` is too long."""
        if len(self.columns) > len(self.inputs):
            raise ValueError(f"{len(self.inputs)} ids, of which {len(self.columns)} are drawn")
        for name, least, ids in (("inputs", 0, self.inputs), ("columns", -1, self.columns)):
            if not all(least <= each < num_logits for each in ids):
                raise ValueError(f"{name}: an id that is none of the model's {num_logits}")


class IdTables:
    """``OtherIds`` as tensors: ``inputs`` on the batch's device, ``columns`` on that of the logits."""

    def __init__(self, ids: OtherIds, device: torch.device, logits_device: torch.device) -> None:
        self._inputs = torch.tensor(ids.inputs, dtype=torch.int64, device=device)
        columns = torch.tensor(ids.columns, dtype=torch.int64, device=logits_device)
        self._lacks = columns < 0
        self._columns = columns.clamp(min=0)

    def model_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The model's ids [T] int64 for the ids [T] of a batch."""
        return self._inputs.index_select(0, token_ids)

    def by_drawn_id(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of a model's logits [R, V] in the order of drawn ids; minus infinity for ids that are never drawn."""
        return logits.index_select(1, self._columns).masked_fill_(self._lacks, -torch.inf)


class NativeRow(ctypes.Structure):
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


class DrawRule:
    """Sampling parameters of a choice in the form that native drawing takes."""

    def __init__(self, params: SamplingParams) -> None:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)}
        self.params = params
        self.ends = frozenset(ends)
        self._ends = array("q", sorted(ends))
        self.row = NativeRow(
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
    """Row of the logits from which the first token is drawn."""
    position: int
    """Position of the first drawn token: the number of the sequence's tokens."""
    num_rounds: int
    """Most tokens to draw. All but the last may be computed: ``block_ids`` covers their slots, from ``position`` on."""
    block_ids: array[int]
    """Block table of the sequence, which must not be resized during the call."""
    path_score: float = 1.0
    """Score of the row's path; each drawn token multiplies it by the token's share of its draw's scores."""
    least_path_score: float = 0.0
    """Path score below which the row ends."""
    least_fork_score: float = math.inf
    """Path score of a second best token from which on all rows' rounds end."""
    ends_all: bool = False
    """Whether the end of this row ends the rounds of all rows."""
    adjusting: RowContext | None = None
    """Context for adjusting the logits of the first draw; needed if the rule adjusts logits."""

    chain: int = 0
    """Rejection mode: number of the chain that the draws belong to, which selects their random numbers."""

    @property
    def context(self) -> RowContext:
        """The sampler's context of the first draw."""
        return self.adjusting or RowContext(self.rule.params, self.position, self.position)


class Drawing(Protocol):
    """Draws several tokens of each row in one call."""

    most_rounds: int
    """Most draws of a row that a call should ask for."""
    most_call_s: float
    """Most seconds that a call should take: commits wait for its end."""
    has_sparse: bool = False
    """Whether `draw_sparse` is supported. On a CPU each draw sorts a row of logits, beside which calls are cheap."""
    ends_at_forks: bool
    """Whether all rows should end where one forks: more rounds without the forked rows gain less than they cost."""
    num_passes: int = 0
    """Number of forward passes of the last call."""

    def takes(self, rule: DrawRule) -> bool:
        """Whether rows of this rule can be drawn."""

    def draw(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[list[Draw]]:
        """The draws of each row, one or more; a row ends early at an end token or a low path score.

        Each draw equals, bit for bit, the sampler's draw from a step's logits at that position. The keys and values of
        every drawn token but a row's last are written to the slots from the row's position on, which the caller must
        own.

        Args:
            rows: one row or more, in any order.
            logits: [R, num_logits] float32 of this runner's last step; with other ids in the order of these.
            num_top: tokens per draw, at most the vocabulary's size.

        Raises:
            IndexError: a position is out of the model's range.
            ValueError: a row's rule is not taken, or the row lacks `adjusting`.
        """

    def draw_sparse(
        self, rows: Sequence[DrawRow], logits: torch.Tensor, num_sparse: int
    ) -> list[list[DraftSample | None]]:
        """As `draw`, for rejection verification: each draw is one of the `num_sparse` likeliest tokens, with their
        distribution.

        The number of a row's draws does not depend on drawn tokens: it is `num_rounds`, or a lower limit for all rows.
        A None, where no token can be drawn, is a row's last draw.
        """
        raise TypeError("draws have no distributions")

    def prepare(self, num_top: int) -> None:
        """Prepare calls with `num_top` tokens per draw, before the first request."""
        return

    def by_ids(self, ids: OtherIds) -> Drawing:
        """A ``Drawing`` over the same model that takes and draws other ids than the model's.

        Raises:
            ValueError: an id maps to none of the model's ids; an implementation on a GPU leaves the check to torch.
        """


def pruned(rows: Sequence[DrawRow], of_rounds: Sequence[Sequence[Draw]]) -> list[list[Draw]]:
    """The draws of each row up to the end that ``DrawRow`` defines, equal to those of ``native/ahead.cpp``."""
    drawn: list[list[Draw]] = []
    last = len(of_rounds)
    for row, draws in zip(rows, zip(*of_rounds, strict=True), strict=True):
        path_score, own = row.path_score, list[Draw]()
        for token_ids, scores in draws:
            own.append((token_ids, scores))
            shares = [math.exp(score - scores[0]) for score in scores]
            is_fork = len(shares) > 1 and path_score * (shares[1] / sum(shares)) >= row.least_fork_score
            path_score /= sum(shares)
            is_end = (
                math.isnan(scores[0])
                or len(own) >= row.num_rounds
                or path_score < row.least_path_score
                or token_ids[0] in row.rule.ends
            )
            if is_fork or (is_end and row.ends_all):
                last = min(last, len(own))
            if is_end:
                break
        drawn.append(own)
    return [own[:last] for own in drawn]
