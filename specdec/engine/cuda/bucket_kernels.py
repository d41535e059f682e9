"""Batches of captured steps, in Triton: padding in place of some fifteen copies, and going on from what was drawn."""

import triton
import triton.language as tl

# Parts of one packed copy, and sizes of a batch: the kernel is compiled once, whatever they are.
_OF_BATCH = [
    "input_ids", "positions", "slot_mapping", "row_seq", "context_lens", "path_offsets", "path_slots", "block_tables"
]  # fmt: skip
_SIZES = ["num_rows", "num_seqs", "num_slots", "table_width", "spare_block"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_OF_BATCH)
def fill_kernel(
    input_ids,
    positions,
    slot_mapping,
    row_seq,
    context_lens,
    path_offsets,
    path_slots,
    block_tables,
    to_input_ids,
    to_positions,
    to_slot_mapping,
    to_row_seq,
    to_context_lens,
    to_path_offsets,
    to_path_slots,
    to_block_tables,
    num_rows,
    num_seqs,
    num_slots,
    table_width,
    spare_block,
    NUM_ROWS: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Line ``i`` of everything; grid (rows + 1,), the last for the end of the paths. Rows past ``num_rows`` are the
    first token of the last sequence, which has the spare block."""
    i = tl.program_id(0)
    is_row = i < num_rows
    if i < NUM_ROWS:
        tl.store(to_input_ids + i, tl.load(input_ids + i, mask=is_row, other=0))
        tl.store(to_positions + i, tl.load(positions + i, mask=is_row, other=0))
        slot = tl.load(slot_mapping + i, mask=is_row, other=0)
        tl.store(to_slot_mapping + i, tl.where(is_row, slot, spare_block.to(tl.int64) * BLOCK_SIZE))
        tl.store(to_row_seq + i, tl.load(row_seq + i, mask=is_row, other=NUM_ROWS - 1))
        tl.store(to_context_lens + i, tl.load(context_lens + i, mask=is_row, other=1))
        slots = i * SLOTS_PER_ROW + tl.arange(0, SLOTS_PER_ROW)
        tl.store(to_path_slots + slots, tl.load(path_slots + slots, mask=slots < num_slots, other=0))
        if i < num_seqs:
            for low in range(0, table_width, BLOCK):
                column = low + tl.arange(0, BLOCK)
                blocks = tl.load(block_tables + i * table_width + column, mask=column < table_width, other=0)
                tl.store(to_block_tables + i * TABLE_WIDTH + column, blocks, mask=column < table_width)
        elif i == NUM_ROWS - 1:
            tl.store(to_block_tables + i * TABLE_WIDTH, spare_block.to(tl.int32))
    offset = tl.load(path_offsets + i, mask=i <= num_rows, other=0)
    tl.store(to_path_offsets + i, tl.where(i <= num_rows, offset, num_slots))


@triton.jit
def advance_kernel(
    drawn,
    positions,
    num_passes,
    block_tables,
    to_input_ids,
    to_positions,
    to_slot_mapping,
    to_context_lens,
    ROUND: tl.constexpr,
    NUM_TOP: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPARE_BLOCK: tl.constexpr,
):
    """Rows of the pass over what round ``ROUND`` has drawn [rows, 2, NUM_TOP]; grid (rows,). ``positions`` are those of
    round 0. A row of fewer passes computes the first position of its table once more, into the spare block."""
    r = tl.program_id(0)
    is_due = tl.load(num_passes + r) > ROUND
    position = tl.where(is_due, tl.load(positions + r) + ROUND, 0)
    block = tl.load(block_tables + r * TABLE_WIDTH + position // BLOCK_SIZE).to(tl.int64)
    slot = tl.where(is_due, block * BLOCK_SIZE + position % BLOCK_SIZE, SPARE_BLOCK * BLOCK_SIZE)
    token = tl.load(drawn + r * 2 * NUM_TOP)
    tl.store(to_input_ids + r, tl.where(is_due, token, 0).to(tl.int64))
    tl.store(to_positions + r, position.to(tl.int64))
    tl.store(to_slot_mapping + r, slot)
    tl.store(to_context_lens + r, position + 1)
