"""Draws several tokens of each row in one captured graph: draw, compute the drawn tokens, draw again, without the
host."""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.buckets import ROW_BUCKETS, BucketedPasses, BucketedSteps, Forward, row_bucket
from specdec.engine.cuda.sampling import MOST_TOP, CutKinds, cut_kinds, launch_scores, launch_top
from specdec.engine.drawing.rows import Draw, Drawing, DrawRow, DrawRule, IdTables, OtherIds, pruned
from specdec.engine.drawing.uploads import Adjustments, call_layout, call_parts, packed_call
from specdec.engine.model.beside import PassRows
from specdec.engine.sampling.logit_processors import RowContext, row_numbers
from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sampling.scored_ids import ids_of, read_top, scored
from specdec.engine.sampling.sparse import certain, draw_sparse, read_sparse
from specdec.wire.sampling_params import SamplingParams

ROUND_BUCKETS = (2, 4, 8)
"""Numbers of draws of captured graphs; the first draw is launched before the graph, from the last step's logits."""
_PREPARED_ROWS = (8, 4, 2, 1)
_MOST_WIDE_ROWS = 32
"""Most rows of a graph with adjusted logits or sparse draws, which take several bytes per row and token. Chosen, not
measured."""
_logger = logging.getLogger(__name__)


class _Kind(NamedTuple):
    num_draws: int
    num_top: int
    """Tokens of each draw."""
    cuts: CutKinds = (False, False)
    is_adjusted: bool = False
    """Whether the graph adjusts logits before they are cut and drawn."""
    is_sparse: bool = False
    """Whether draws are for rejection verification; `num_top` is then the size of their distributions plus one."""


class DeviceDrawing(BucketedPasses[_Kind], Drawing):
    """``Drawing`` on a GPU: every row is computed to the end, and the host drops draws past a row's end.

    A captured call reads a packed upload (`call_layout`) and the block tables of its batch. It fills scored ids
    ``[draws, rows, num_top]``, of which the first draw is launched before the replay. It has at most twice the draws
    of which the call before used some.

    Cost: one copy to the device, about 15 launches, a graph, and one copy back, for which it waits. If a row's logits
    are adjusted, a call adds the cost of `Adjustments.fill`. Graphs of rows with cuts or adjusted logits are captured
    when the first such row comes.
    """

    most_rounds = ROUND_BUCKETS[-1]
    ends_at_forks = False
    has_sparse = True
    most_call_s = 8e-3
    """Seconds, about two steps of a target that is worth drafting for. Chosen, not measured."""

    def __init__(self, steps: BucketedSteps, max_len: int, sampler: Sampler, other_ids: OtherIds | None = None) -> None:
        """Draw by the model of ``steps``, which has ``max_len`` positions, the ids that ``sampler`` samples.

        ``sampler`` draws single tokens where no graph serves. ``other_ids``: replace the model's; None: none do.
        """
        subject = "drawing several tokens"
        super().__init__(steps.capture, subject, steps.shape, may_replay=lambda: bool(steps.row_edges))
        self._steps = steps
        self._cache = cache = steps.cache
        self._vocab_size = sampler.vocab_size
        self._max_len = max_len
        self._sampler = sampler
        self._last_used = ROUND_BUCKETS[-1]
        self._other_ids = None if other_ids is None else IdTables(other_ids, cache.device, cache.device)

    def takes(self, rule: DrawRule) -> bool:
        """See ``Drawing``: it takes all rules without bad words."""
        return not rule.params.bad_words

    def by_ids(self, ids: OtherIds) -> DeviceDrawing:
        """See ``Drawing``; ids that the model does not have raise in torch. Cost: a copy of the logits of each pass."""
        return DeviceDrawing(self._steps, self._max_len, Sampler(len(ids.columns), self._sampler.device), ids)

    def prepare(self, num_top: int) -> None:
        """Capture graphs for few rows as time and memory allow, and check one of them. The cache must be empty."""
        num_top = min(num_top, self._vocab_size)
        kinds = [_Kind(num_draws, num_top) for num_draws in reversed(ROUND_BUCKETS)]
        self.capture_ahead((kind, num_rows) for num_rows in _PREPARED_ROWS for kind in kinds)
        if not self._draws_as_single_steps(num_top):
            _logger.error("a captured graph draws other tokens than single steps; no graph draws")
            self.drop(for_good=True)

    @torch.inference_mode()
    def _draws_as_single_steps(self, num_top: int) -> bool:
        """Whether the graph of one row draws the tokens that single steps draw, with noise."""
        cache, num_draws = self._cache, min(ROUND_BUCKETS[-1], self._max_len - 1)
        table = array("i", range(-(-(num_draws + 2) // cache.block_size)))
        if num_draws < 2 or len(table) >= cache.num_blocks:
            return True
        row = DrawRow(DrawRule(SamplingParams(max_tokens=num_draws, seed=1, temperature=1.0)), 0, 1, num_draws, table)
        logits = self._logits_of(table, 0, 0)
        results = self._replayed([row], logits, num_draws, num_top)
        for number, token in enumerate([] if results is None else ids_of(results[:, 0, 0]).tolist()):
            context = RowContext(row.rule.params, 1 + number, 1)
            if self._sampler.sample(logits, [context]) != [token]:
                return False
            logits = self._logits_of(table, token, 1 + number)
        return True

    def _logits_of(self, table: Sequence[int], token_id: int, position: int) -> torch.Tensor:
        """Logits of a pass over one token, by the ids that are drawn."""
        rows = PassRows(self._cache.block_size)
        rows.add_sequence(table)
        rows.add(token_id, position)
        return self._by_drawn_ids(rows.batch(self._cache.device), self._steps)

    def _by_drawn_ids(self, batch: Batch, run: Callable[[Batch, KVCache], torch.Tensor]) -> torch.Tensor:
        """Logits of a pass by the ids that are drawn, which the batch has as well."""
        if self._other_ids is None:
            return run(batch, self._cache)[:, : self._vocab_size]
        batch.input_ids = self._other_ids.model_ids(batch.input_ids)
        return self._other_ids.by_drawn_id(run(batch, self._cache))

    def draw(self, rows: Sequence[DrawRow], logits: torch.Tensor, num_top: int) -> list[list[Draw]]:
        """See ``Drawing``."""
        self._check(rows)
        num_top, num_draws = min(num_top, self._vocab_size), max(row.num_rounds for row in rows)
        wanted = min(num_draws, 2 * self._last_used)
        results = self._replayed(rows, logits, wanted, num_top) if num_top <= MOST_TOP else None
        if results is not None:
            token_ids, scores = read_top(results)
        else:
            token_ids, scores = self._sampler.top(self._first(rows, logits), [row.context for row in rows], num_top)
        draws = [(token_ids[at : at + num_top], scores[at : at + num_top]) for at in range(0, len(token_ids), num_top)]
        of_rounds = [draws[at : at + len(rows)] for at in range(0, len(draws), len(rows))]
        drawn = pruned(rows, of_rounds)
        if results is not None:
            self._last_used = max(map(len, drawn))
        return drawn

    def draw_sparse(
        self, rows: Sequence[DrawRow], logits: torch.Tensor, num_sparse: int
    ) -> list[list[DraftSample | None]]:
        """See ``Drawing``."""
        self._check(rows)
        # The number of draws must not depend on tokens drawn before (docs/rejection.md).
        num_draws, num_sparse = max(row.num_rounds for row in rows), min(num_sparse, self._vocab_size)
        results = self._replayed(rows, logits, num_draws, 1 + num_sparse, is_sparse=True)
        if results is not None:
            of_rounds = [read_sparse(of_round) for of_round in results]
        else:
            contexts, chains = [row.context for row in rows], [row.chain for row in rows]
            of_rounds = [self._sampler.draft_sample(self._first(rows, logits), contexts, num_sparse, chains)]
        return [
            _until_none([of_round[index] for of_round in of_rounds[: row.num_rounds]]) for index, row in enumerate(rows)
        ]

    @torch.inference_mode()
    def _replayed(
        self, rows: Sequence[DrawRow], logits: torch.Tensor, num_draws: int, num_top: int, *, is_sparse: bool = False
    ) -> torch.Tensor | None:
        """Results of ``num_draws`` draws, rounded up to a bucket, ``[draws, rows, num_top]`` scored ids on the host;
        None: no graph serves."""
        self.num_passes = 0
        num_rows = row_bucket(len(rows)) if num_draws > 1 else None
        numbers = row_numbers([row.context for row in rows], self._vocab_size)
        is_adjusted = any(row.adjusting is not None for row in rows)
        most_rows = _MOST_WIDE_ROWS if is_adjusted or is_sparse else ROW_BUCKETS[-1]
        if num_rows is None or num_rows > most_rows or max(len(row.block_ids) for row in rows) > self.shape.num_blocks:
            return None
        bucket = next((bucket for bucket in ROUND_BUCKETS if bucket >= num_draws), ROUND_BUCKETS[-1])
        kind = _Kind(bucket, num_top, cut_kinds(numbers, self._vocab_size), is_adjusted, is_sparse)
        graph = self.get((kind, num_rows))
        if graph is None:
            return None
        self.num_passes = bucket - 1
        width = max(len(row.block_ids) for row in rows)
        layout = call_layout(bucket, num_rows, width)
        graph.take(None, packed_call(rows, layout, numbers, self.shape, is_sparse=is_sparse))
        packed, drawn, _ = graph.inputs
        parts = call_parts(packed, layout)
        graph.batch.block_tables[:, :width].copy_(parts["tables"])
        first = logits.index_select(0, parts["logits_rows"][: len(rows)])[:, : self._vocab_size]
        if is_adjusted:
            self._adjustments.fill([row.context for row in rows])
        self._launch_draw(kind, parts, 0, first, drawn)
        graph.replay()
        return drawn.cpu()[:, : len(rows)].contiguous()

    @functools.cached_property
    def _adjustments(self) -> Adjustments:
        return Adjustments(_MOST_WIDE_ROWS, self._vocab_size, self._cache.device)

    def _first(self, rows: Sequence[DrawRow], logits: torch.Tensor) -> torch.Tensor:
        """Logits of the rows' first draws."""
        return logits[[row.logits_row for row in rows], : self._vocab_size]

    def _launch_draw(
        self, kind: _Kind, parts: Mapping[str, torch.Tensor], number: int, logits: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        """Launch one draw for each row of the logits, by a call's first rows."""
        num_rows = len(logits)
        out, numbers, keys = drawn[number, :num_rows], parts["numbers"][:num_rows], parts["keys"][number, :num_rows]
        if kind.is_adjusted:
            logits = self._adjustments.adjusted(logits, number)
        scores = launch_scores(logits, numbers, kind.cuts)
        if kind.is_sparse:
            probs = torch.softmax(scores.to(torch.float64), dim=1).to(torch.float32)
            probs = torch.where(numbers[:, :1] == 0.0, certain(scores), probs)
            # A copy: a view may begin at an address that is not aligned for float64.
            out.copy_(draw_sparse(probs, keys.clone().view(torch.float64), kind.num_top - 1))
        else:
            out.copy_(launch_top(scores, numbers, keys, kind.num_top))

    def _check(self, rows: Sequence[DrawRow]) -> None:
        for row in rows:
            if row.rule.params.adjusts_logits and (row.adjusting is None or not self.takes(row.rule)):
                raise ValueError("a row's logits are adjusted, by what is not told or not known here")
            if row.position + row.num_rounds - 1 > self._max_len:
                raise IndexError(f"position {row.position} and {row.num_rounds - 1} more are out of the model's range")

    def made(self, kind: _Kind, num_rows: int) -> tuple[tuple[torch.Tensor, ...], Forward]:
        """All passes and draws after the first draw: see ``BucketedPasses``."""
        layout, device = call_layout(kind.num_draws, num_rows, self.shape.num_blocks), self._cache.device
        packed = torch.zeros(layout.itemsize // 4, dtype=torch.int32, device=device)
        call_parts(packed, layout)["slots"].fill_(self.shape.spare_slot)  # where runs before the capture write
        row_seq = torch.arange(num_rows, dtype=torch.int32, device=device)
        zeros = torch.zeros(kind.num_draws, num_rows, kind.num_top, device=device)
        drawn = scored(zeros, zeros.to(torch.int64))

        def run(batch: Batch) -> torch.Tensor:
            parts = call_parts(packed, layout)
            context_lens = (parts["positions"] + 1).to(torch.int32)
            for number in range(kind.num_draws - 1):
                token_ids = ids_of(drawn[number, :, 0])
                if kind.is_adjusted:
                    self._adjustments.count(token_ids)
                own = replace(
                    batch,
                    input_ids=token_ids,
                    position_ids=parts["positions"][number],
                    slot_mapping=parts["slots"][number],
                    row_seq=row_seq,
                    context_lens=context_lens[number],
                    path_slots=batch.path_slots[:0],
                )
                logits = self._by_drawn_ids(own, self._steps.forward)
                self._launch_draw(kind, parts, number + 1, logits, drawn)
            return drawn

        return (packed, drawn, row_seq), run


def _until_none(samples: Sequence[DraftSample | None]) -> list[DraftSample | None]:
    """The samples up to the first None, included."""
    end = next((index + 1 for index, sample in enumerate(samples) if sample is None), len(samples))
    return list(samples[:end])
