"""Batches of captured steps, in Triton: one launch pads a batch, in place of about fifteen copies, or advances it."""

import triton
import triton.language as tl

# Parts of packed copies, and sizes: each kernel is compiled once for all alignments and values of these. Otherwise the
# first use of a bucket could stop a stream for the time of compiling.
_OF_BATCH = [
    "input_ids", "positions", "slot_mapping", "row_seq", "context_lens", "path_offsets", "path_slots", "block_tables"
]  # fmt: skip
_FILLED = ["to_input_ids", "to_positions", "to_slot_mapping", "to_context_lens"]
_SIZES = ["num_rows", "num_seqs", "num_slots", "table_width", "to_num_rows", "to_table_width", "spare_block"]


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
    to_num_rows,
    to_table_width,
    spare_block,
    SLOTS_PER_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy row ``i`` and table ``i``; grid (rows + 1,), the last for the end of the paths. Rows from ``num_rows`` on
    become the first token of the last sequence, which has the spare block."""
    i = tl.program_id(0)
    is_row = i < num_rows
    if i < to_num_rows:
        tl.store(to_input_ids + i, tl.load(input_ids + i, mask=is_row, other=0))
        tl.store(to_positions + i, tl.load(positions + i, mask=is_row, other=0))
        slot = tl.load(slot_mapping + i, mask=is_row, other=0)
        tl.store(to_slot_mapping + i, tl.where(is_row, slot, spare_block.to(tl.int64) * BLOCK_SIZE))
        tl.store(to_row_seq + i, tl.load(row_seq + i, mask=is_row, other=to_num_rows - 1))
        tl.store(to_context_lens + i, tl.load(context_lens + i, mask=is_row, other=1))
        slots = i * SLOTS_PER_ROW + tl.arange(0, SLOTS_PER_ROW)
        tl.store(to_path_slots + slots, tl.load(path_slots + slots, mask=slots < num_slots, other=0))
        if i < num_seqs:
            for low in range(0, table_width, BLOCK):
                column = low + tl.arange(0, BLOCK)
                blocks = tl.load(block_tables + i * table_width + column, mask=column < table_width, other=0)
                tl.store(to_block_tables + i * to_table_width + column, blocks, mask=column < table_width)
        elif i == to_num_rows - 1:
            tl.store(to_block_tables + i * to_table_width, spare_block.to(tl.int32))
    offset = tl.load(path_offsets + i, mask=i <= num_rows, other=0)
    tl.store(to_path_offsets + i, tl.where(i <= num_rows, offset, num_slots))


@triton.jit(
    do_not_specialize=["number", "num_top", "table_width", "spare_block"],
    do_not_specialize_on_alignment=["drawn", "positions", "num_passes", "block_tables", *_FILLED],
)
def advance_kernel(
    drawn,
    positions,
    num_passes,
    block_tables,
    to_input_ids,
    to_positions,
    to_slot_mapping,
    to_context_lens,
    number,
    num_top,
    table_width,
    spare_block,
    BLOCK_SIZE: tl.constexpr,
):
    """Set up the pass over the tokens ``drawn`` [rows, 2, num_top] in round ``number``; grid (rows,). ``positions``:
    those of round 0. A row with fewer passes computes position 0 again, into the spare block."""
    r = tl.program_id(0)
    is_due = tl.load(num_passes + r) > number
    position = tl.where(is_due, tl.load(positions + r) + number, 0)
    block = tl.load(block_tables + r * table_width + position // BLOCK_SIZE).to(tl.int64)
    slot = tl.where(is_due, block * BLOCK_SIZE + position % BLOCK_SIZE, spare_block.to(tl.int64) * BLOCK_SIZE)
    token = tl.load(drawn + r * 2 * num_top)
    tl.store(to_input_ids + r, tl.where(is_due, token, 0).to(tl.int64))
    tl.store(to_positions + r, position.to(tl.int64))
    tl.store(to_slot_mapping + r, slot)
    tl.store(to_context_lens + r, position + 1)
