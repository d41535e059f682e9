"""The best tokens of scores plus noise, found on the device without waiting, and one copy to the host.

Hashes equal the CPU's, scores are rounded as on the CPU, and ties go to the lowest id. Noise is -log(-log(1 - u)) in
float64, rounded once to float32. As u has 33 bits, 1 - u is exact: the inner logarithm equals the ``log1p`` of
``noise.py`` up to the last bits of a float64.

A *scored id* is an int64 that orders tokens by score, then by falling id: the score's bits, made to rise with it, above
the id's distance from the largest id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from specdec.engine.cuda.launch import launch

MOST_TOP = 16
"""Most tokens per row that the kernels find."""
_BLOCK = 1024
LARGEST_ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def _mix(
    x, SHIFT_1: tl.constexpr, MUL_1: tl.constexpr, SHIFT_2: tl.constexpr, MUL_2: tl.constexpr, SHIFT_3: tl.constexpr
):
    x ^= x >> SHIFT_1
    x *= MUL_1
    x ^= x >> SHIFT_2
    x *= MUL_2
    x ^= x >> SHIFT_3
    return x


@triton.jit
def hash_u32(ids, first_key, second_key):
    """``noise.hash_u32`` of ids and keys, all uint32."""
    x = _mix(ids ^ first_key, 16, 0x7FEB352D, 15, 0x846CA68B, 16)
    return _mix(x ^ second_key, 16, 0x21F0AAAD, 15, 0xD35A2D97, 15)


@triton.jit
def gumbel(hashes):
    """``noise.gumbel_from_bits`` of hashes."""
    u = (hashes.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@triton.jit
def _store_best(scored, to, NUM_TOP: tl.constexpr):
    for i in tl.static_range(NUM_TOP):
        best = tl.max(scored, 0)
        tl.store(to + i, best)
        scored = tl.where(scored == best, NOTHING, scored)


# Rows' parameters are a part of a packed copy: the kernel is compiled once for all alignments.
@triton.jit(do_not_specialize_on_alignment=["rows"])
def draw_kernel(logits, best, rows, parts, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_TOP: tl.constexpr):
    """The best scored ids of each chunk by score plus noise; grid (rows, chunks). ``rows`` [R, 3]: keys, temperature.

    The scores of a row whose ``best`` logit is not finite are minus infinity.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest = tl.load(best + row)
    first_key = tl.load(rows + row * 3).to(tl.uint32, bitcast=True)
    second_key = tl.load(rows + row * 3 + 1).to(tl.uint32, bitcast=True)
    temperature = tl.load(rows + row * 3 + 2).to(tl.float32, bitcast=True)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * row_stride + ids, mask=ids < VOCAB, other=float("-inf"))
    if temperature > 0.0:
        noise = gumbel(hash_u32(ids.to(tl.uint32), first_key, second_key))
        scores = tl.div_rn(scores - highest, tl.zeros_like(scores) + temperature) + noise
    scores = tl.where(tl.abs(highest) < float("inf"), scores, float("-inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # minus zero equals zero
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    scored = tl.where(ids < VOCAB, (rising << 32) | (ids ^ LARGEST_ID).to(tl.int64), NOTHING)
    _store_best(scored, parts + (row * tl.num_programs(1) + chunk) * NUM_TOP, NUM_TOP)


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
        out: tensor for the result; None: a new one.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_chunks = -(-vocab_size // _BLOCK)
    parts = torch.empty(num_rows, num_chunks * num_top, dtype=torch.int64, device=logits.device)
    launch(
        draw_kernel,
        (num_rows, num_chunks),
        logits=logits,
        best=logits.amax(dim=1),
        rows=rows,
        parts=parts,
        row_stride=logits.stride(0),
        VOCAB=vocab_size,
        BLOCK=_BLOCK,
        NUM_TOP=num_top,
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    best = parts.topk(num_top).values
    return best if out is None else out.copy_(best)


def scored(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Scored ids of float32 scores, which are not negative, and int64 ids of one shape."""
    return (scores.view(torch.int32).to(torch.int64) << 32) | (LARGEST_ID.value - ids)


def ids_of(scored_ids: torch.Tensor) -> torch.Tensor:
    """The int64 ids of scored ids."""
    return LARGEST_ID.value - (scored_ids & 0xFFFFFFFF)


def read_top(out: torch.Tensor) -> tuple[list[int], list[float]]:
    """Token ids and scores, row by row, of scored ids ``[..., n]`` on the host; NaN: the row's best is minus
    infinity."""
    bits = (out.numpy() >> 32).astype(np.int32)
    scores = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
    ids = np.where(scores == -np.inf, 0, ids_of(out).numpy())
    scores[scores[..., 0] == -np.inf] = np.nan
    return ids.reshape(-1).tolist(), scores.reshape(-1).tolist()
