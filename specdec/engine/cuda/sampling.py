"""The best tokens of scores plus noise, found on the device without waiting, and one copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec.engine.cuda.attention import power_of_two
from specdec.engine.cuda.launch import launch
from specdec.engine.cuda.sampling_kernels import LARGEST_ID, draw_kernel, merge_kernel

MOST_TOP = 16
"""Most tokens per row that the kernels find."""
_BLOCK = 1024
_LARGEST_ID = int(LARGEST_ID.value)


def device_perturbed_top(
    logits: torch.Tensor, temperatures: Sequence[float], keys: Sequence[int], num_top: int
) -> tuple[list[int], list[float]]:
    """``perturbed_top.perturbed_top`` on the device, for ``num_top`` up to ``MOST_TOP``, with the same results.

    Cost: a copy to the device, three kernels, and a copy back, for which it waits.
    """
    return start_perturbed_top(logits, temperatures, keys, num_top)()


def start_perturbed_top(
    logits: torch.Tensor, temperatures: Sequence[float], keys: Sequence[int], num_top: int
) -> Callable[[], tuple[list[int], list[float]]]:
    """Launch ``device_perturbed_top`` without waiting; the returned function waits for its result."""
    rows = row_parameters(temperatures, keys).to(logits.device, non_blocking=True)
    out = launch_top(logits, rows, num_top)
    if not out.is_cuda:  # interpreted kernels
        return lambda: read_top(out)
    on_host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)  # a copy to other memory would wait
    on_host.copy_(out, non_blocking=True)
    end: torch.cuda.Event = torch.cuda.Event()
    end.record(torch.cuda.current_stream(out.device))

    def found() -> tuple[list[int], list[float]]:
        end.synchronize()
        return read_top(on_host)

    return found


def row_parameters(temperatures: Sequence[float], keys: Sequence[int]) -> torch.Tensor:
    """Rows' parameters for ``launch_top``, ``[R, 3]`` int32 on the host: two keys and the temperature, as bits."""
    rows = np.empty((len(temperatures), 3), np.uint32)
    rows[:, :2] = np.array(keys, np.uint64).reshape(-1, 2)
    rows[:, 2] = np.array(temperatures, np.float32).view(np.uint32)
    return torch.from_numpy(rows.view(np.int32))


def launch_top(logits: torch.Tensor, rows: torch.Tensor, num_top: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The best tokens, ``[R, num_top]`` scored ids on the device, for ``read_top``. No operation waits for data.

    Args:
        logits: ``[R, V]`` float32; copied if the tokens of a row are not contiguous.
        rows: result of ``row_parameters``, on the same device.
        num_top: tokens per row, from 1 to ``MOST_TOP``, at most V.
        out: contiguous tensor for the result; None: a new one.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_chunks = -(-vocab_size // _BLOCK)
    parts = torch.empty(num_rows, num_chunks * num_top, dtype=torch.int64, device=logits.device)
    if out is None:
        out = torch.empty(num_rows, num_top, dtype=torch.int64, device=logits.device)
    launch(
        draw_kernel,
        (num_rows, num_chunks),
        logits,
        logits.amax(dim=1),
        rows,
        parts,
        logits.stride(0),
        VOCAB=vocab_size,
        BLOCK=_BLOCK,
        NUM_TOP=num_top,
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    launch(
        merge_kernel,
        (num_rows,),
        parts,
        out,
        NUM_PARTS=parts.shape[1],
        BLOCK=power_of_two(parts.shape[1]),
        NUM_TOP=num_top,
        options={"num_warps": 4},
    )
    return out


def scored(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Scored ids (``sampling_kernels``) of float32 scores, which are not negative, and int64 ids of one shape."""
    return (scores.view(torch.int32).to(torch.int64) << 32) | (_LARGEST_ID - ids)


def ids_of(scored_ids: torch.Tensor) -> torch.Tensor:
    """The int64 ids of scored ids."""
    return _LARGEST_ID - (scored_ids & 0xFFFFFFFF)


def read_top(out: torch.Tensor) -> tuple[list[int], list[float]]:
    """Token ids and scores, row by row, of scored ids ``[..., n]`` on the host; NaN: the row's best is minus
    infinity."""
    bits = (out.numpy() >> 32).astype(np.int32)
    scores = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
    ids = np.where(scores == -np.inf, 0, ids_of(out).numpy())
    scores[scores[..., 0] == -np.inf] = np.nan
    return ids.reshape(-1).tolist(), scores.reshape(-1).tolist()
