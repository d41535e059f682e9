"""How the tokens of a choice are drawn: the arguments of a call that draws several of each row, and by which ids."""

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
"""Best tokens with their scores, as ``NativeSampling.perturbed_top`` returns them of one row."""


@dataclass(frozen=True, slots=True)
class OtherIds:
    """By what tokens are drawn in place of a model's own ids: noise, cuts, ends and ties go by these."""

    inputs: Sequence[int]
    """[ids]: the model's id for each."""
    columns: Sequence[int]
    """[ids that are drawn], the first ones: the model's id whose logit it has; -1: it is never drawn."""

    def check(self, num_logits: int) -> None:
        """Raises ``ValueError`` unless all stand for ids below `num_logits`."""
        if len(self.columns) > len(self.inputs):
            raise ValueError(f"{len(self.inputs)} ids, of which {len(self.columns)} are drawn")
        for name, least, ids in (("inputs", 0, self.inputs), ("columns", -1, self.columns)):
            if not all(least <= each < num_logits for each in ids):
                raise ValueError(f"{name}: an id that is none of the model's {num_logits}")


class IdTables:
    """Both lists on the devices where they are used."""

    def __init__(self, ids: OtherIds, device: torch.device, logits_device: torch.device) -> None:
        self._inputs = torch.tensor(ids.inputs, dtype=torch.int64, device=device)
        columns = torch.tensor(ids.columns, dtype=torch.int64, device=logits_device)
        self._lacks = columns < 0
        self._columns = columns.clamp(min=0)

    def model_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The model's ids for those of a batch, [T] int64."""
        return self._inputs.index_select(0, token_ids)

    def by_drawn_id(self, logits: torch.Tensor) -> torch.Tensor:
        """A model's logits [R, V] in the order of drawn ids, minus infinity for what is never drawn: a copy."""
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
    """How the tokens of a choice are drawn."""

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
    """Which row of the logits follows its tokens."""
    position: int
    """Number of its tokens: the position of the first one drawn."""
    num_rounds: int
    """Most tokens to draw. All but the last may be computed: ``block_ids`` covers their slots, from ``position`` on."""
    block_ids: array[int]
    """Its block table; not to be resized during the call."""
    path_score: float = 1.0
    """Times the score of each token drawn, as a share of those of its draw; below ``least_path_score`` it ends."""
    least_path_score: float = 0.0
    least_fork_score: float = math.inf
    """A second best token that makes this path score ends the rounds of all rows."""
    ends_all: bool = False
    """The end of this row ends the rounds of all."""
    adjusting: RowContext | None = None
    """What its logits are adjusted by, where its rule says that they are."""

    chain: int = 0
    """Rejection mode: which of the chains that come to its position its draws are for."""

    @property
    def context(self) -> RowContext:
        """What the sampler must know of its first draw."""
        return self.adjusting or RowContext(self.rule.params, self.position, self.position)


class Drawing(Protocol):
    """Draws several tokens of each row in one call."""

    most_rounds: int
    """More draws of a row than this are not worth a call."""
    most_call_s: float
    """What a call should take at most: commits wait for its end."""
    has_sparse: bool
    """`draw_sparse` can be called."""
    ends_at_forks: bool
    """Rounds end for all rows where one forks: to draw on without those that join is worth less than it costs."""
    num_passes: int
    """Forward passes of the last call."""

    def takes(self, rule: DrawRule) -> bool:
        """Whether it draws rows of this rule."""

    def draw(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[list[Draw]]:
        """What is drawn for each row, one draw or more: a row ends early where nothing would follow a token.

        Each draw is what the sampler draws at that position from what a step computes there, bit for bit. Writes the
        keys and values of every token drawn but a row's last into the slots from the row's position on; the caller
        must own these.

        Args:
            rows: at least one, in any order.
            logits: [R, num_logits] float32, as the last step of this runner gave them; with other ids in their order.
            num_top: tokens per draw, at most the vocabulary.

        Raises:
            IndexError: a position is out of the model's range.
            ValueError: a row has a rule that it does not take, or lacks what its logits are adjusted by.
        """

    def draw_sparse(
        self, rows: Sequence[DrawRow], logits: torch.Tensor, num_sparse: int
    ) -> list[list[DraftSample | None]]:
        """As `draw`, for rejection verification: a token of each row's likeliest `num_sparse`, with their distribution.

        A row's draws are as many as it asks for, or fewer for all rows, whatever is drawn; None, from which nothing can
        be drawn, is its last one.
        """

    def prepare(self, num_top: int) -> None:
        """Do what can be done before the first call, with so many tokens per draw."""

    def by_ids(self, ids: OtherIds) -> Drawing:
        """The same over the same model, of which logits, draws and ends have other ids than the model's.

        Raises:
            ValueError: some stand for ids that the model does not have, where nothing else would notice.
        """


def pruned(rows: Sequence[DrawRow], of_rounds: Sequence[Sequence[Draw]]) -> list[list[Draw]]:
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
