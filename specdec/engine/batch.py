"""A scheduled step as tensors: one ragged batch of prefill chunks, decodes and trees.

Rows of one item are its new tokens, then its tree nodes; items follow each other. Row ``r`` attends to positions ``0 ..
position_ids[r]``, always in order of position: the first ``context_lens[r]`` of them through the block table, the rest
(only for nodes of branching trees) through ``path_slots[path_offsets[r]:path_offsets[r + 1]]``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.outputs import ItemOutput
from specdec.engine.scheduler import ScheduledItem, ScheduledStep
from specdec.engine.states.plan import StatePlan, plan_of
from specdec.engine.tap import HiddenTap
from specdec.engine.tree import TokenTree

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


def build_batch(step: ScheduledStep, block_size: int, device: torch.device | str) -> tuple[Batch, list[ItemOutput]]:
    """A non-empty step as tensors on `device`, and each item's rows of its output.

    Cost: one host-to-device copy; for each item some extensions of lists, whatever its number of rows.
    """
    items = step.items
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits: list[int] = []
    row_seq: list[int] = []
    contexts: list[int] = []
    path_ends = [0]
    path_slots: list[int] = []
    outputs: list[ItemOutput] = []
    for line, item in enumerate(items):
        seq, start, num_new, num_nodes = item.seq, item.start, item.num_new_tokens, item.num_tree_nodes
        first_logits, end = len(logits), start + num_new + num_nodes
        first_row, end_row = len(input_ids), len(input_ids) + end - start
        if seq.prompt_logits:
            logits += range(first_row, end_row)
        elif item.completes and (num_nodes or seq.wants_logits):
            logits += range(first_row + max(0, num_new - 1), end_row)
        outputs.append(
            ItemOutput(
                seq=seq,
                rows=slice(first_logits, len(logits)),
                start=start,
                num_new_tokens=num_new,
                tree_nodes=num_nodes,
                completes=item.completes,
                batch_rows=slice(first_row, end_row),
            )
        )
        # An item's rows write one run of logical slots, nodes after tokens.
        slots += _physical_slots(seq.block_ids, start, end, block_size)
        row_seq += [line] * (end - start)
        input_ids += seq.token_ids[start : start + num_new]
        tree, num_in_place = seq.tree, 0
        if num_nodes and tree is not None:
            input_ids += tree.token_ids[:num_nodes]
            num_in_place = min(num_nodes, tree.num_in_place)
        num_flat = num_new + num_in_place
        positions += range(start, start + num_flat)
        contexts += range(start + 1, start + num_flat + 1)
        path_ends += [len(path_slots)] * num_flat
        if num_in_place < num_nodes and tree is not None:
            contexts += [len(seq.token_ids)] * (num_nodes - num_in_place)
            for path in _paths(tree, num_in_place, slots[first_row + num_new :]):
                positions.append(len(seq.token_ids) - 1 + len(path))
                path_slots += path
                path_ends.append(len(path_slots))
    num_rows, width = len(input_ids), max([len(item.seq.block_ids) for item in items])
    narrow = array("i", [*row_seq, *contexts, *path_ends, *path_slots])
    for item in items:
        narrow += item.seq.block_ids
        narrow.frombytes(bytes(narrow.itemsize * (width - len(item.seq.block_ids))))
    [wide_words], [narrow_words] = to_device(
        [np.frombuffer(array("q", [*input_ids, *positions, *slots, *logits]), np.int64)],
        [np.frombuffer(narrow, np.int32)],
        device,
    )
    ids, position_ids, slot_mapping, logits_indices = wide_words.split_with_sizes(
        [num_rows, num_rows, num_rows, len(logits)]
    )
    seqs, context_lens, path_offsets, paths, tables = narrow_words.split_with_sizes(
        [num_rows, num_rows, num_rows + 1, len(path_slots), len(items) * width]
    )
    batch = Batch(
        input_ids=ids,
        position_ids=position_ids,
        slot_mapping=slot_mapping,
        row_seq=seqs,
        context_lens=context_lens,
        path_offsets=path_offsets,
        path_slots=paths,
        block_tables=tables.view(len(items), width),
        logits_indices=logits_indices,
        num_seqs=len(items),
        states=_states(items),
    )
    return batch, outputs


def _states(items: list[ScheduledItem]) -> StatePlan | None:
    states = [item.states for item in items if item.states is not None]
    return plan_of(states) if states else None


def _physical_slots(block_ids: array[int], start: int, end: int, block_size: int) -> Iterable[int]:
    """Physical slots of the logical slots `start` to `end`: one range for each block."""
    index, offset = divmod(start, block_size)
    first = block_ids[index] * block_size + offset
    if offset + end - start <= block_size:
        return range(first, first + end - start)
    slots = list(range(first, first + block_size - offset))
    for block in block_ids[index + 1 : (end - 1) // block_size + 1]:
        slots += range(block * block_size, (block + 1) * block_size)
    return slots[: end - start]


def _paths(tree: TokenTree, num_in_place: int, slots: list[int]) -> list[list[int]]:
    """Slots of the path to each node off the leading chain; `slots`: of all nodes."""
    paths: list[list[int]] = []
    for node in range(num_in_place, len(slots)):
        parent = tree.parents[node]
        above = slots[: parent + 1] if parent < num_in_place else paths[parent - num_in_place]
        paths.append([*above, slots[node]])
    return paths


def to_device(
    wide: list[Int64Array], narrow: list[Int32Array], device: torch.device | str
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Arrays as tensors on a device, by a single copy unless the device is the CPU."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(each) for each in wide], [torch.from_numpy(each) for each in narrow]
    packed = torch.from_numpy(np.concatenate([*(each.view(np.int32) for each in wide), *narrow]))
    return unpacked(packed.to(device, non_blocking=True), [len(each) for each in wide], [len(each) for each in narrow])


def unpacked(
    packed: torch.Tensor, wide_lens: list[int], narrow_lens: list[int]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Views of packed int32 words: first int64 arrays of `wide_lens`, then int32 arrays of `narrow_lens`."""
    num_wide = 2 * sum(wide_lens)
    return packed[:num_wide].view(torch.int64).split(wide_lens), packed[num_wide:].split(narrow_lens)
