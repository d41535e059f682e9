"""A scheduled step as tensors."""

import tracemalloc
from array import array
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.batch import build_batch
from specdec.engine.scheduler import ScheduledItem, ScheduledStep
from specdec.engine.sequence import Sequence
from specdec.engine.tree import TokenTree
from tests.support.engine.exact_runner import attended_slots, check_batch

BLOCK_SIZE = 4
OTHERS = ("num_seqs", "tap", "states")


def sequence(num_tokens: int, blocks: list[int], tree: TokenTree | None = None) -> Sequence:
    tokens = list(range(100, 100 + num_tokens))
    return Sequence(seq_id=0, token_ids=tokens, num_prompt_tokens=num_tokens, block_ids=array("i", blocks), tree=tree)


def item(seq: Sequence, start: int, num_new: int, num_nodes: int = 0) -> ScheduledItem:
    return ScheduledItem(seq, start, num_new, num_nodes, start + num_new == len(seq.token_ids))


def test_a_chunk_a_decode_and_a_chain_share_one_batch() -> None:
    chunk = item(sequence(9, [5, 2]), 2, 5)
    decode = item(sequence(5, [7, 1]), 4, 1)
    chain = item(sequence(3, [3, 4], TokenTree([50, 51])), 2, 1, 2)
    batch, outputs = build_batch(ScheduledStep([chunk, decode, chain]), BLOCK_SIZE, "cpu")
    check_batch(batch)
    assert batch.num_seqs == 3
    assert batch.input_ids.tolist() == [102, 103, 104, 105, 106, 104, 102, 50, 51]
    assert batch.position_ids.tolist() == [2, 3, 4, 5, 6, 4, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [22, 23, 8, 9, 10, 4, 14, 15, 16]
    assert batch.row_seq.tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2]
    assert batch.context_lens.tolist() == [3, 4, 5, 6, 7, 5, 3, 4, 5]
    assert batch.path_slots.tolist() == []
    assert batch.block_tables.tolist() == [[5, 2], [7, 1], [3, 4]]
    assert batch.logits_indices.tolist() == [5, 6, 7, 8]
    assert [each.rows for each in outputs] == [slice(0, 0), slice(0, 1), slice(1, 4)]


def test_nodes_of_a_bush_read_their_own_path_only() -> None:
    tree = TokenTree([50, 51, 52, 53], [-1, 0, 0, 2])
    batch, _ = build_batch(ScheduledStep([item(sequence(6, [9, 3, 0], tree), 5, 1, 4)]), BLOCK_SIZE, "cpu")
    check_batch(batch)
    committed = [36, 37, 38, 39, 12, 13]
    assert batch.slot_mapping.tolist() == [13, 14, 15, 0, 1]
    assert batch.position_ids.tolist() == [5, 6, 7, 7, 8]
    assert attended_slots(batch, 0, BLOCK_SIZE) == committed
    assert attended_slots(batch, 1, BLOCK_SIZE) == [*committed, 14]
    assert attended_slots(batch, 2, BLOCK_SIZE) == [*committed, 14, 15]
    assert attended_slots(batch, 3, BLOCK_SIZE) == [*committed, 14, 0]
    assert attended_slots(batch, 4, BLOCK_SIZE) == [*committed, 14, 0, 1]
    assert batch.context_lens.tolist() == [6, 7, 8, 6, 6]


def test_paths_of_two_bushes_stay_apart() -> None:
    step = ScheduledStep(
        [
            item(sequence(1, [0], TokenTree([5, 6], [-1, -1])), 0, 1, 2),
            item(sequence(4, [1], None), 3, 1),
            item(sequence(1, [2], TokenTree([7, 8, 9], [-1, -1, 1])), 0, 1, 3),
        ]
    )
    batch, outputs = build_batch(step, BLOCK_SIZE, "cpu")
    check_batch(batch)
    assert attended_slots(batch, 2, BLOCK_SIZE) == [0, 2]
    assert attended_slots(batch, 7, BLOCK_SIZE) == [8, 10, 11]
    assert [each.rows for each in outputs] == [slice(0, 3), slice(3, 4), slice(4, 8)]


def test_a_bush_cut_to_its_leading_chain_has_no_paths() -> None:
    tree = TokenTree([50, 51, 52], [-1, 0, 0])
    batch, _ = build_batch(ScheduledStep([item(sequence(3, [0, 1], tree), 2, 1, 2)]), BLOCK_SIZE, "cpu")
    assert batch.path_slots.tolist() == []
    assert batch.context_lens.tolist() == [3, 4, 5]


def test_prompt_logits_keep_every_row_of_a_chunk() -> None:
    seq = sequence(9, [0, 1, 2])
    seq.prompt_logits = True
    batch, [output] = build_batch(ScheduledStep([item(seq, 0, 4)]), BLOCK_SIZE, "cpu")
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    assert output.rows == slice(0, 4)


def test_a_sequence_that_only_warms_the_cache_has_no_logits() -> None:
    seq = sequence(4, [0])
    seq.wants_logits = False
    batch, [output] = build_batch(ScheduledStep([item(seq, 0, 4)]), BLOCK_SIZE, "cpu")
    assert (batch.logits_indices.tolist(), output.rows) == ([], slice(0, 0))


def test_a_tree_without_a_new_token_has_only_the_rows_of_its_nodes() -> None:
    seq = sequence(4, [0, 1], TokenTree([50, 51]))
    batch, [output] = build_batch(ScheduledStep([item(seq, 4, 0, 2)]), BLOCK_SIZE, "cpu")
    check_batch(batch)
    assert batch.slot_mapping.tolist() == [4, 5]
    assert (batch.logits_indices.tolist(), output.rows) == ([0, 1], slice(0, 2))


def test_tables_of_different_lengths_are_padded() -> None:
    step = ScheduledStep([item(sequence(9, [5, 6, 7]), 8, 1), item(sequence(2, [1]), 1, 1)])
    batch, _ = build_batch(step, BLOCK_SIZE, torch.device("cpu"))
    assert batch.block_tables.tolist() == [[5, 6, 7], [1, 0, 0]]
    assert batch.block_tables.is_contiguous()


@pytest.mark.parametrize("is_single", [True, False])
def test_a_step_goes_to_another_device_in_one_copy_and_arrives_as_it_was(
    is_single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = [item(sequence(9, [5, 6, 7]), 8, 1), item(sequence(2, [1]), 1, 1)]
    step = ScheduledStep(single if is_single else [item(sequence(6, [9, 3], TokenTree([5, 6])), 5, 1, 2), single[1]])
    expected, _ = build_batch(step, BLOCK_SIZE, "cpu")
    copies: list[str] = []

    def stays(data: torch.Tensor, device: str, **_options: object) -> torch.Tensor:
        copies.append(device)
        return data.clone()

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", stays)
        batch, _ = build_batch(step, BLOCK_SIZE, "meta")
    assert copies == ["meta"]
    for field in fields(batch):
        ours, theirs = getattr(batch, field.name), getattr(expected, field.name)
        same = torch.equal(ours, theirs) and ours.dtype == theirs.dtype if field.name not in OTHERS else ours == theirs
        assert same, field.name


def a_tree(parents: list[int]) -> TokenTree:
    return TokenTree([50 + node for node in range(len(parents))], parents)


@st.composite
def steps(draw: st.DrawFn) -> ScheduledStep:
    """Items with blocks in any order: chunks, single tokens, and whole or cut trees below a token that is computed."""
    items = []
    free = draw(st.permutations(range(60)))
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 20))
        parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 7)))]
        completes = draw(st.booleans())
        start = draw(st.integers(0, length - 1))
        num_new = length - start if completes else draw(st.integers(1, length - start))
        num_nodes = draw(st.integers(0, len(parents))) if start + num_new == length else 0
        num_blocks = -(-(length + num_nodes) // BLOCK_SIZE)
        seq = sequence(length, free[:num_blocks], a_tree(parents) if parents else None)
        seq.prompt_logits, seq.wants_logits = draw(st.booleans()), draw(st.booleans())
        free = free[num_blocks:]
        items.append(item(seq, start, num_new, num_nodes))
    return ScheduledStep(items)


@given(step=steps())
def test_each_row_has_its_token_place_and_path(step: ScheduledStep) -> None:
    batch, outputs = build_batch(step, BLOCK_SIZE, "cpu")
    check_batch(batch)
    row, with_logits = 0, []
    for line, (each, of_item) in enumerate(zip(step.items, outputs, strict=True)):
        seq, length = each.seq, len(each.seq.token_ids)
        slots = [block * BLOCK_SIZE + offset for block in seq.block_ids for offset in range(BLOCK_SIZE)]
        first_logits = len(with_logits)
        for place in range(each.start, each.start + each.num_new_tokens + each.num_tree_nodes):
            node = place - length
            tree = seq.tree if node >= 0 else None
            path = [] if tree is None else [slots[length + above] for above in tree.path(node)]
            assert batch.row_seq[row] == line
            assert batch.input_ids[row] == (seq.token_ids[place] if tree is None else tree.token_ids[node])
            assert batch.position_ids[row] == (place if tree is None else length - 1 + len(path))
            assert batch.slot_mapping[row] == slots[place]
            assert attended_slots(batch, row, BLOCK_SIZE) == [*slots[: place + 1 if tree is None else length], *path]
            if seq.prompt_logits or (
                each.completes and place >= length - 1 and (seq.wants_logits or each.num_tree_nodes)
            ):
                with_logits.append(row)
            row += 1
        assert of_item.rows == slice(first_logits, len(with_logits))
    assert batch.logits_indices.tolist() == with_logits
    assert len(batch.input_ids) == row


@pytest.mark.parametrize("change", ["chunk", "not its last", "no logits", "nodes"])
def test_what_has_no_row_of_logits_per_token_is_not_a_step_of_single_tokens(change: str) -> None:
    seq = sequence(6, [1, 2, 3], TokenTree([50]))
    seq.wants_logits = change != "no logits"
    other = {"chunk": item(seq, 4, 2), "not its last": item(seq, 4, 1), "nodes": item(seq, 5, 1, 1)}
    step = ScheduledStep([item(sequence(5, [7, 8]), 4, 1), other.get(change, item(seq, 5, 1))])
    batch, outputs = build_batch(step, BLOCK_SIZE, "cpu")
    check_batch(batch)
    num_logits = {"nodes": 2, "chunk": 1}.get(change, 0)
    assert [each.rows.stop - each.rows.start for each in outputs] == [1, num_logits]


def test_tables_of_long_contexts_are_copied_and_never_lists_of_numbers() -> None:
    num_blocks = 4096
    items = [item(sequence(1, list(range(number, num_blocks + number))), 0, 1) for number in range(16)]
    tracemalloc.start()
    try:
        batch, _ = build_batch(ScheduledStep(items), BLOCK_SIZE, "cpu")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch.block_tables[:, 0].tolist() == list(range(16))
    assert peak < 3 * 4 * 16 * num_blocks, "a list of numbers takes 8 bytes for each, beside the table"
