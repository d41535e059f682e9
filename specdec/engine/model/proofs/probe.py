"""The self-test of a loaded model: paged logits against dense ones, and a row's bits in different batches.

Two short sequences of random tokens run through a cache of their own: whole, in chunks, mixed, token by token, and as
branches of a tree, in scattered blocks. Rows that have seen the same tokens must agree with the dense model within a
tolerance, and with each other bit by bit if the engine is to be row-invariant.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.states.memory import CellShape, StateMemory
from specdec.engine.states.plan import StatePlan, plan_of
from specdec.engine.states.sessions import ItemStates

_LENGTHS = (37, 22)
FORBIDDEN = -1e30
"""Logits below are of tokens that a class never generates; their spread would hide all errors."""
_TOLERANCE = {
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}  # root mean square error over the logits' standard deviation

_FP8_TOLERANCE = 0.3

PagedForward = Callable[[Batch, KVCache], torch.Tensor]
DenseForward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One row of a probe batch: its tokens so far, where it writes, and where it reads."""

    sequence: int
    path: tuple[int, ...]  # all tokens from position 0 to the row's own
    logical_slot: int
    context_len: int
    path_logical_slots: tuple[int, ...] = ()


@dataclass(slots=True)
class ProbeLog:
    """Logits by a row's tokens so far."""

    rows: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)

    def add(self, rows: Sequence[ProbeRow], logits: torch.Tensor) -> None:
        """Add the logits ``[T, V]`` of one pass."""
        for row, values in zip(rows, logits.cpu(), strict=True):
            self.rows.setdefault(row.path, []).append(values)

    @property
    def row_invariant(self) -> bool:
        """Whether all rows with the same tokens are equal in every bit."""
        return all(torch.equal(first, other) for first, *others in self.rows.values() for other in others)

    def error(self, dense: DenseForward, sequences: Sequence[Sequence[int]]) -> float:
        """Root mean square difference from the dense model, over the dense logits' standard deviation."""
        squares, spread = [torch.zeros(())], [torch.zeros(())]
        for tokens in sequences:
            expected = dense(torch.tensor(tokens)).cpu()
            for position, want in enumerate(expected):
                allowed = want > FORBIDDEN
                for got in self.rows.get(tuple(tokens[: position + 1]), []):
                    squares.append((got - want)[allowed].double().square().mean())
                    spread.append(want[allowed].double().var(unbiased=False))
        scale = torch.stack(spread[1:]).mean().clamp_min(1e-24)
        return float((torch.stack(squares[1:]).mean() / scale).sqrt())


class SelfTest:
    """The batches of the self-test for one vocabulary and block size."""

    def __init__(self, vocab_size: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.num_positions = max_model_len
        """Tokens of the model's context."""
        generator = torch.Generator().manual_seed(20)
        longest = min(_LENGTHS[0], max_model_len - 2)
        drawn = torch.randint(0, vocab_size, (longest + _LENGTHS[1],), generator=generator).tolist()
        self._first: list[int] = drawn[:longest]
        self._second: list[int] = drawn[longest : longest + min(_LENGTHS[1], max_model_len)]
        self._nodes = [int(i) for i in torch.randint(0, vocab_size, (3,), generator=generator)]
        self._block_size = block_size
        self._device = device
        self._num_slots = longest + 4
        self._blocks_per_seq = -(-self._num_slots // block_size)

    @property
    def num_blocks(self) -> int:
        """KV blocks that the probe needs."""
        return 2 * self._blocks_per_seq + 1

    @property
    def sequences(self) -> list[list[int]]:
        """Token sequences whose prefixes are all the paths of the probe."""
        left, right, below = self._nodes
        return [[*self._first, left, below], [*self._first, right], self._second]

    def run(
        self,
        forward: PagedForward,
        cache: KVCache,
        alone: PagedForward | None = None,
        around: Callable[[Sequence[tuple[int, ...]]], AbstractContextManager[None]] = lambda paths: nullcontext(),
    ) -> ProbeLog:
        """Run all batches, each inside ``around`` its rows' tokens so far. ``alone`` runs the token-by-token ones, for
        example on another number of threads.
        """
        log = ProbeLog()
        first, second, end = self._first, self._second, len(self._first)
        cut, half = len(first) // 2, len(second) // 2
        tree = self._tree_rows()
        plans = [
            self._token_rows(0, first, 0, cut) + self._token_rows(1, second, 0, half),
            self._token_rows(0, first, cut, end - 1) + self._token_rows(1, second, half, half + 1),
            self._token_rows(0, first, end - 1, end) + tree + self._token_rows(1, second, half + 1, len(second)),
            self._token_rows(0, first, 0, end),
        ]
        # Tokens in the sequences' states before and after each batch: at chunks' ends, within one, and behind.
        lengths = (
            [(0, 0), (cut, half), (cut, half + 1), (0, 0)],
            [(cut, half), (cut, half + 1), (end - 1, half), (end - 3, 0)],
        )
        for rows, begun, saved in zip(plans, *lengths, strict=True):
            with around([row.path for row in rows]):
                log.add(rows, forward(self.batch(rows, self._states(rows, begun, saved)), cache))
        for position in range(end - 3, end):
            rows = self._token_rows(0, first, position, position + 1)
            states = self._states(rows, (position, 0), (position + 1, 0))
            with around([row.path for row in rows]):
                log.add(rows, (alone or forward)(self.batch(rows, states), cache))
        return log

    def memory(self, cells: Sequence[CellShape], device: torch.device) -> StateMemory | None:
        """Memory of the probe's states, for a model with such recurrences."""
        return StateMemory(cells, 2, 2 * self._num_slots, device) if cells else None

    def _states(self, rows: Sequence[ProbeRow], begun: Sequence[int], saved: Sequence[int]) -> StatePlan:
        """States of a batch, by sequence: tokens in the state before and after it. Each slot keeps its inputs."""
        items = []
        for sequence in sorted({row.sequence for row in rows}):
            own = [row for row in rows if row.sequence == sequence]
            tokens = [row for row in own if not row.path_logical_slots]
            nodes = [row for row in own if row.path_logical_slots]
            paths = [row.path for row in nodes]
            first_kept = sequence * self._num_slots
            items.append(
                ItemStates(
                    read_slot=sequence if begun[sequence] else -1,
                    write_slot=sequence,
                    save_after=max(0, saved[sequence] - begun[sequence]),
                    repeated=[first_kept + slot for slot in range(begun[sequence], own[0].logical_slot)],
                    kept=[first_kept + row.logical_slot for row in own],
                    num_new_tokens=len(tokens),
                    parents=[paths.index(path[:-1]) if path[:-1] in paths else -1 for path in paths],
                )
            )
        return plan_of(items)

    def prefix_rows(self, num_rows: int) -> list[ProbeRow]:
        """Rows of one prefill chunk of the first sequence."""
        return self._token_rows(0, self._first, 0, min(num_rows, len(self._first)))

    def batch(self, rows: Sequence[ProbeRow], states: StatePlan | None = None) -> Batch:
        """The rows as a batch with logits of every row. ``states``: None if the sequences begin in it."""
        sequences = sorted({row.sequence for row in rows})
        # Blocks in descending order, sequences interleaved: no slot has its plain place.
        tables = [[self.num_blocks - 1 - (2 * i + s) for i in range(self._blocks_per_seq)] for s in (0, 1)]

        def slot(sequence: int, logical: int) -> int:
            return tables[sequence][logical // self._block_size] * self._block_size + logical % self._block_size

        def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        offsets, path_slots = [0], []
        for row in rows:
            path_slots += [slot(row.sequence, logical) for logical in row.path_logical_slots]
            offsets.append(len(path_slots))
        return Batch(
            input_ids=tensor([row.path[-1] for row in rows], torch.int64),
            position_ids=tensor([len(row.path) - 1 for row in rows], torch.int64),
            slot_mapping=tensor([slot(row.sequence, row.logical_slot) for row in rows], torch.int64),
            row_seq=tensor([sequences.index(row.sequence) for row in rows]),
            context_lens=tensor([row.context_len for row in rows]),
            path_offsets=tensor(offsets),
            path_slots=tensor(path_slots),
            block_tables=torch.tensor([tables[s] for s in sequences], dtype=torch.int32, device=self._device),
            logits_indices=torch.arange(len(rows), device=self._device),
            num_seqs=len(sequences),
            states=states,
        )

    def _token_rows(self, sequence: int, tokens: list[int], start: int, end: int) -> list[ProbeRow]:
        return [ProbeRow(sequence, tuple(tokens[: i + 1]), i, i + 1) for i in range(start, end)]

    def _tree_rows(self) -> list[ProbeRow]:
        """Two children of the first sequence's last token, and a child of the first of them."""
        left, right, below = self._nodes
        stem, end = tuple(self._first), len(self._first)
        return [
            ProbeRow(0, (*stem, left), end, end, (end,)),
            ProbeRow(0, (*stem, right), end + 1, end, (end + 1,)),
            ProbeRow(0, (*stem, left, below), end + 2, end, (end, end + 2)),
        ]


def tolerance(dtype: torch.dtype, *, is_fp8: bool = False) -> float:
    """Largest error that passes the self-test; `is_fp8`: inputs of products are rounded to 8 bits."""
    return _FP8_TOLERANCE if is_fp8 else _TOLERANCE[dtype]
