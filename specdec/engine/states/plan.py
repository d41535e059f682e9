"""A step's recurrent states as arrays: what each row continues, and what is saved and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.states.sessions import ItemStates
from specdec.engine.tree import ROOT

Int64Array = npt.NDArray[np.int64]


@dataclass(kw_only=True)
class SequenceSpan:
    """One sequence's part of a plan, in order of computation."""

    read_slot: int
    write_slot: int
    save_after: int
    """Tokens, repeated ones included, after which the state is saved; 0: it is not saved."""
    repeated: list[int]
    """Rows of kept inputs to repeat first."""
    first_row: int
    """Row of the batch of its first new token or node."""
    num_new: int
    num_rows: int
    parents: Sequence[int]
    """Parents of the nodes, which follow the new tokens; ROOT: the last token."""

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """Nodes so that a node follows its parent or another child of it, with their depths."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        order: list[tuple[int, int]] = []
        stack = [(node, 1) for node in reversed(children.get(ROOT, []))]
        while stack:
            node, depth = stack.pop()
            order.append((node, depth))
            stack += [(child, depth + 1) for child in reversed(children.get(node, []))]
        return order


@dataclass(eq=False, kw_only=True)
class StatePlan:
    """Spans of all sequences of a batch, and the rows that are kept."""

    spans: list[SequenceSpan]
    kept: list[int]
    """Row of kept inputs that each row of the batch is kept in; -1: it is not kept."""
    windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By width: `window_of` of the whole plan, computed once per pass."""

    @cached_property
    def kept_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the batch that are kept, and where."""
        where = np.array(self.kept, np.int64)
        rows = np.flatnonzero(where >= 0)
        return torch.from_numpy(rows), torch.from_numpy(where[rows])

    @cached_property
    def repeated(self) -> torch.Tensor:
        """Kept rows to repeat, of all spans in order."""
        return torch.tensor([row for span in self.spans for row in span.repeated], dtype=torch.int64)

    @cached_property
    def saved(self) -> list[SequenceSpan]:
        """Spans whose state is saved."""
        return [span for span in self.spans if span.save_after and span.write_slot >= 0]

    @cached_property
    def numbers(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Spans as scan.cpp reads them, all nodes in their order with their depths, and the greatest depth."""
        spans: list[list[int]] = []
        nodes: list[tuple[int, int]] = []
        num_repeated = 0
        for span in self.spans:
            repeated = num_repeated, len(span.repeated)
            own_nodes = len(nodes), len(span.order)
            place = span.first_row, span.num_new
            spans.append([span.read_slot, span.write_slot, span.save_after, *repeated, *place, *own_nodes])
            num_repeated += len(span.repeated)
            nodes += span.order
        depths = [depth for _, depth in nodes]
        return torch.tensor(spans), torch.tensor(nodes, dtype=torch.int64), max(depths, default=0)

    @cached_property
    def read(self) -> torch.Tensor:
        """Slots of the states that spans begin with; -1: none."""
        return torch.tensor([span.read_slot for span in self.spans], dtype=torch.int64)

    @cached_property
    def written(self) -> torch.Tensor:
        """Slots of the states that `saved` spans write."""
        return torch.tensor([span.write_slot for span in self.saved], dtype=torch.int64)

    def window(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where to find the `width` inputs before each row, oldest first, and before each saved state.

        Indices ``[T, width]`` and ``[saved, width]`` into: `width` inputs of each span's state, repeated inputs, rows.
        """
        if width not in self.windows:
            self.windows[width] = _windows(self, width)
        return self.windows[width]


def _windows(plan: StatePlan, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    first_repeated = len(plan.spans) * width
    first_row = first_repeated + len(plan.repeated)
    rows = np.zeros((len(plan.kept), width), np.int64)
    saved: list[list[int]] = []
    for number, span in enumerate(plan.spans):
        line = list(range(number * width, (number + 1) * width))
        line += range(first_repeated, first_repeated + len(span.repeated))
        first_repeated += len(span.repeated)
        start = len(line) - width
        line += range(first_row + span.first_row, first_row + span.first_row + span.num_new)
        for new in range(span.num_new):
            rows[span.first_row + new] = line[start + new : start + new + width]
        if span.save_after and span.write_slot >= 0:
            saved.append(line[span.save_after : span.save_after + width])
        if not span.parents:
            continue
        end = line[len(line) - width :]
        first_node = span.first_row + span.num_new
        for node, parent in enumerate(span.parents):
            above = first_node + parent
            rows[first_node + node] = end if parent == ROOT else [*rows[above][1:], first_row + above]
    return torch.from_numpy(rows), torch.tensor(saved, dtype=torch.int64).view(-1, width)


def plan_of(items: Sequence[ItemStates]) -> StatePlan:
    """The plan of a step's items, whose rows follow each other."""
    spans: list[SequenceSpan] = []
    kept: list[int] = []
    for item in items:
        spans.append(
            SequenceSpan(
                read_slot=item.read_slot,
                write_slot=item.write_slot,
                save_after=item.save_after,
                repeated=item.repeated,
                first_row=len(kept),
                num_new=item.num_new_tokens,
                num_rows=len(item.kept),
                parents=item.parents,
            )
        )
        kept += item.kept
    return StatePlan(spans=spans, kept=kept)


def fresh_plan(row_seq: Sequence[int]) -> StatePlan:
    """The plan of sequences that begin in this batch and are not continued. `row_seq`: the rows' sequences, sorted."""
    items = []
    for num_rows in Counter(row_seq).values():
        items.append(
            ItemStates(
                read_slot=-1,
                write_slot=-1,
                save_after=0,
                repeated=[],
                kept=[-1] * num_rows,
                num_new_tokens=num_rows,
                parents=[],
            )
        )
    return plan_of(items)
