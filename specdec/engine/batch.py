"""A scheduled step as tensors: one ragged batch of prefill chunks, decodes and trees.

Rows of one item are its new tokens, then its tree nodes; items follow each other. Row ``r`` attends to positions ``0 ..
position_ids[r]``, always in order of position: the first ``context_lens[r]`` of them through the block table, the rest
(only for nodes of branching trees) through ``path_slots[path_offsets[r]:path_offsets[r + 1]]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.scheduler import ScheduledItem, ScheduledStep
from specdec.engine.states.plan import StatePlan, plan_of
from specdec.engine.tap import HiddenTap

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Batch:
    """Input of one forward pass, on the runner's device.

    T rows, S sequences, R rows with logits, P path slots.

    For every row: ``context_lens[r] + (path_offsets[r + 1] - path_offsets[r]) == position_ids[r] + 1``.
    """

    input_ids: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64; a tree node's position follows from its depth."""
    slot_mapping: torch.Tensor
    """[T] int64, the physical slot (block * block_size + offset) that the row writes; unique."""
    row_seq: torch.Tensor
    """[T] int32, the row's line of `block_tables`, ascending."""
    context_lens: torch.Tensor
    """[T] int32, leading positions read through the block table, the row itself included unless it has a path."""
    path_offsets: torch.Tensor
    """[T + 1] int32, bounds of each row's part of `path_slots`."""
    path_slots: torch.Tensor
    """[P] int32, physical slots of positions ``context_lens[r] ..``, in order of position, the row itself last."""
    block_tables: torch.Tensor
    """[S, max_blocks] int32, padded with zeros."""
    logits_indices: torch.Tensor
    """[R] int64, rows with logits, ascending."""
    num_seqs: int
    """Equals S."""
    tap: HiddenTap | None = None
    """Hidden states that the pass must also return."""
    states: StatePlan | None = None
    """States of recurrent layers; None: sequences begin here, or the model has none."""


@dataclass(slots=True)
class ItemRows:
    """An item's rows of the logits ``[R, V]``: ``[row_start, row_start + num_rows)``.

    They are [last pending token, node 0, node 1, ...] if the item completes. If the sequence wants prompt logits, the
    chunk's other tokens come before them.
    """

    item: ScheduledItem
    row_start: int
    num_rows: int


def build_batch(step: ScheduledStep, block_size: int, device: torch.device | str) -> tuple[Batch, list[ItemRows]]:
    """A non-empty step as tensors on `device`.

    Cost: one host-to-device copy, and a number of array operations that does not depend on the number of sequences.
    """
    items = step.items
    if _are_single(items):
        return _build_single(items, block_size, device)
    num_rows = np.array([item.num_new_tokens + item.num_tree_nodes for item in items], np.int64)
    starts = np.array([item.start for item in items], np.int64)
    row_ends = np.cumsum(num_rows)
    total = int(row_ends[-1])

    block_tables = _block_tables(items)
    row_seq = np.repeat(np.arange(len(items)), num_rows)
    # An item's rows write one run of logical slots, nodes after tokens.
    logical_slots = np.arange(total) + np.repeat(starts - row_ends + num_rows, num_rows)
    blocks = block_tables[row_seq, logical_slots // block_size].astype(np.int64)
    slot_mapping = blocks * block_size + logical_slots % block_size
    position_ids = logical_slots
    context_lens = (logical_slots + 1).astype(np.int32)
    path_offsets, path_slots = np.zeros(total + 1, np.int32), np.zeros(0, np.int32)
    if any(item.num_tree_nodes and not _is_in_place(item) for item in items):
        path_offsets, path_slots = _lay_out_paths(items, position_ids, context_lens, slot_mapping)

    input_ids: list[int] = []
    logits_indices: list[int] = []
    item_rows: list[ItemRows] = []
    for item in items:
        first_logits = len(logits_indices)
        logits_indices += _rows_with_logits(item, len(input_ids))
        item_rows.append(ItemRows(item, first_logits, len(logits_indices) - first_logits))
        input_ids += item.seq.token_ids[item.start : item.start + item.num_new_tokens]
        if item.num_tree_nodes and item.seq.tree is not None:
            input_ids += item.seq.tree.token_ids[: item.num_tree_nodes]

    (ids, positions, slots, logits), (seqs, contexts, offsets, paths, tables) = to_device(
        [np.array(input_ids, np.int64), position_ids, slot_mapping, np.array(logits_indices, np.int64)],
        [row_seq.astype(np.int32), context_lens, path_offsets, path_slots, block_tables.reshape(-1)],
        device,
    )
    batch = Batch(
        input_ids=ids,
        position_ids=positions,
        slot_mapping=slots,
        row_seq=seqs,
        context_lens=contexts,
        path_offsets=offsets,
        path_slots=paths,
        block_tables=tables.view(block_tables.shape),
        logits_indices=logits,
        num_seqs=len(items),
        states=_states(items),
    )
    return batch, item_rows


def _states(items: list[ScheduledItem]) -> StatePlan | None:
    states = [item.states for item in items if item.states is not None]
    return plan_of(states) if states else None


def _are_single(items: list[ScheduledItem]) -> bool:
    """Whether each item is one token with logits, as in plain decoding and most steps of a draft."""
    return all(
        item.num_new_tokens == 1 and item.num_tree_nodes == 0 and item.completes and item.seq.wants_logits
        for item in items
    )


def _build_single(
    items: list[ScheduledItem], block_size: int, device: torch.device | str
) -> tuple[Batch, list[ItemRows]]:
    """`build_batch` of single-token items with fewer array operations, which matter beside a small model."""
    num_rows = len(items)
    rows = range(num_rows)
    tokens, positions, slots = [], [], []
    for item in items:
        position = item.start
        tokens.append(item.seq.token_ids[position])
        positions.append(position)
        slots.append(item.seq.block_ids[position // block_size] * block_size + position % block_size)
    contexts = [position + 1 for position in positions]
    tables = _block_tables(items)
    [wide], [narrow] = to_device(
        [np.array([*tokens, *positions, *slots, *rows], np.int64)],
        [np.concatenate([np.array([*rows, *contexts, *([0] * (num_rows + 1))], np.int32), tables.reshape(-1)])],
        device,
    )
    ids, position_ids, slot_mapping, logits_indices = wide.view(4, num_rows).unbind()
    seqs, context_lens, path_offsets, table = narrow.split([num_rows, num_rows, num_rows + 1, tables.size])
    batch = Batch(
        input_ids=ids,
        position_ids=position_ids,
        slot_mapping=slot_mapping,
        row_seq=seqs,
        context_lens=context_lens,
        path_offsets=path_offsets,
        path_slots=narrow[:0],
        block_tables=table.view(tables.shape),
        logits_indices=logits_indices,
        num_seqs=num_rows,
        states=_states(items),
    )
    return batch, [ItemRows(item, row, 1) for row, item in zip(rows, items, strict=True)]


def _is_in_place(item: ScheduledItem) -> bool:
    """Whether the scheduled nodes form a chain, which is read through the block table."""
    tree = item.seq.tree
    return tree is None or item.num_tree_nodes <= tree.num_in_place


def _rows_with_logits(item: ScheduledItem, first_row: int) -> range:
    end = first_row + item.num_new_tokens + item.num_tree_nodes
    if item.seq.prompt_logits:
        return range(first_row, end)
    if not item.completes:
        return range(0)
    last_token = first_row + max(0, item.num_new_tokens - 1)
    if item.num_tree_nodes == 0 and not item.seq.wants_logits:
        return range(0)
    return range(last_token, end)


def _block_tables(items: list[ScheduledItem]) -> Int32Array:
    tables = np.zeros((len(items), max(len(item.seq.block_ids) for item in items)), np.int32)
    for line, item in zip(tables, items, strict=True):
        line[: len(item.seq.block_ids)] = item.seq.block_ids
    return tables


def _lay_out_paths(
    items: list[ScheduledItem], position_ids: Int64Array, context_lens: Int32Array, slot_mapping: Int64Array
) -> tuple[Int32Array, Int32Array]:
    """Set positions, by depth, of nodes off the leading chain. Returns their paths as offsets and slots."""
    path_lens = np.zeros(len(position_ids) + 1, np.int32)
    path_rows: list[int] = []
    row = 0
    for item in items:
        row += item.num_new_tokens
        tree, length = item.seq.tree, len(item.seq.token_ids)
        if tree is not None and not _is_in_place(item):
            for node in range(tree.num_in_place, item.num_tree_nodes):
                depth = tree.depths[node]
                position_ids[row + node] = length - 1 + depth
                context_lens[row + node] = length
                path_lens[row + node + 1] = depth
                path_rows += [row + ancestor for ancestor in tree.path(node)]
        row += item.num_tree_nodes
    return np.cumsum(path_lens, dtype=np.int32), slot_mapping[path_rows].astype(np.int32)


def to_device(
    wide: list[Int64Array], narrow: list[Int32Array], device: torch.device | str
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Arrays as tensors on a device, by a single copy unless the device is the CPU."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in wide], [torch.from_numpy(array) for array in narrow]
    packed = torch.from_numpy(np.concatenate([*(array.view(np.int32) for array in wide), *narrow]))
    return unpacked(packed.to(device, non_blocking=True), [len(each) for each in wide], [len(each) for each in narrow])


def unpacked(
    packed: torch.Tensor, wide_lens: list[int], narrow_lens: list[int]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Views of packed int32 words: first int64 arrays of `wide_lens`, then int32 arrays of `narrow_lens`."""
    num_wide = 2 * sum(wide_lens)
    return packed[:num_wide].view(torch.int64).split(wide_lens), packed[num_wide:].split(narrow_lens)
