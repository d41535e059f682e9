"""The best tokens of scores plus noise, found on the device: three kernels and one copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec.engine.cuda.attention import power_of_two
from specdec.engine.cuda.launch import launch
from specdec.engine.cuda.sampling_kernels import draw_kernel, merge_kernel, row_peak_kernel

MOST_TOP = 16
"""Most tokens per row that the kernels find."""
_BLOCK = 1024


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
    """The best tokens, ``[R, 2, num_top]`` int32 on the device, for ``read_top``. No operation waits for data.

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
    peaks = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    scores = torch.empty(num_rows, num_chunks, num_top, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_chunks, num_top, dtype=torch.int32, device=logits.device)
    if out is None:
        out = torch.empty(num_rows, 2, num_top, dtype=torch.int32, device=logits.device)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    grid = (num_rows, num_chunks)
    stride = logits.stride(0)
    launch(row_peak_kernel, grid, logits, peaks, stride, VOCAB=vocab_size, BLOCK=_BLOCK, options=options)
    launch(
        draw_kernel,
        grid,
        logits,
        rows,
        peaks,
        scores,
        ids,
        stride,
        VOCAB=vocab_size,
        NUM_CHUNKS=num_chunks,
        BLOCK=_BLOCK,
        BLOCK_CHUNKS=power_of_two(num_chunks),
        NUM_TOP=num_top,
        options=options,
    )
    launch(
        merge_kernel,
        (num_rows,),
        peaks,
        scores,
        ids,
        out,
        NUM_CHUNKS=num_chunks,
        BLOCK_CHUNKS=power_of_two(num_chunks),
        BLOCK_PARTS=power_of_two(num_chunks * num_top),
        NUM_TOP=num_top,
        options=options,
    )
    return out


def read_top(out: torch.Tensor) -> tuple[list[int], list[float]]:
    """Token ids and scores, row by row, of a result of ``launch_top`` on the host; NaN: its best is not finite."""
    ids, scores = out[:, 0].reshape(-1), out[:, 1].reshape(-1).view(torch.float32)
    return ids.tolist(), scores.tolist()
