"""Steps as frames: the batches and copies that rank 0 sends to the other ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from specdec.engine.batch import Batch, unpacked
from specdec.engine.parallel.frames import BadFrame, StepFrame, StepKind
from specdec.engine.tap import HiddenTap

_WIDE = ("input_ids", "position_ids", "slot_mapping", "logits_indices")
_NARROW = ("row_seq", "context_lens", "path_offsets", "path_slots", "block_tables")


def forward_frame(batch: Batch) -> StepFrame:
    """The frame of a batch on the CPU, with its tap's ids. Cost: one copy of some kilobytes."""
    tap_ids = () if batch.tap is None else batch.tap.layer_ids
    sizes = (
        batch.input_ids.shape[0],
        batch.logits_indices.shape[0],
        batch.path_slots.shape[0],
        *batch.block_tables.shape,
        batch.num_seqs,
        len(tap_ids),
    )
    payload = bytearray()
    for name in (*_WIDE, *_NARROW):
        payload += getattr(batch, name).contiguous().numpy().tobytes()
    payload += struct.pack(f"<{len(tap_ids)}i", *tap_ids)
    return StepFrame(StepKind.FORWARD, sizes, payload)


def batch_of(frame: StepFrame, device: torch.device) -> Batch:
    """The batch of a forward frame on a device, by one asynchronous copy unless it is the CPU.

    Raises ``BadFrame``.
    """
    num_rows, num_logits, num_path_slots, num_tables, num_blocks, num_seqs, num_taps = frame.sizes
    wide_sizes = [num_rows, num_rows, num_rows, num_logits]
    narrow_sizes = [num_rows, num_rows, num_rows + 1, num_path_slots, num_tables * num_blocks, num_taps]
    _check_sizes(frame, 8 * sum(wide_sizes) + 4 * sum(narrow_sizes))
    if num_seqs != num_tables:
        raise BadFrame(f"{num_tables} block tables for {num_seqs} sequences")
    packed = torch.frombuffer(frame.payload, dtype=torch.int32)
    wide, (*narrow, _) = unpacked(packed.to(device, non_blocking=True), wide_sizes, narrow_sizes)
    tensors = dict(zip((*_WIDE, *_NARROW), [*wide, *narrow], strict=True))
    tensors["block_tables"] = tensors["block_tables"].view(num_tables, num_blocks)
    tap_ids = struct.unpack(f"<{num_taps}i", frame.payload[len(frame.payload) - 4 * num_taps :])
    tap = HiddenTap(tap_ids) if tap_ids else None
    return Batch(**tensors, num_seqs=num_seqs, tap=tap, states=None)


def copies_frame(kind: StepKind, sources: Sequence[int], targets: Sequence[int]) -> StepFrame:
    """The frame of copies of blocks or slots in the KV cache."""
    payload = bytearray(struct.pack(f"<{2 * len(sources)}q", *sources, *targets))
    return StepFrame(kind, (len(sources),), payload)


def copies_of(frame: StepFrame) -> tuple[list[int], list[int]]:
    """Sources and targets of a frame of copies. Raises ``BadFrame``."""
    count = frame.sizes[0]
    _check_sizes(frame, 16 * count)
    numbers = struct.unpack(f"<{2 * count}q", frame.payload)
    return list(numbers[:count]), list(numbers[count:])


def _check_sizes(frame: StepFrame, num_bytes: int) -> None:
    if min(frame.sizes) < 0 or num_bytes != len(frame.payload):
        raise BadFrame(f"a {frame.kind.name} frame of {len(frame.payload)} bytes contradicts its sizes {frame.sizes}")
