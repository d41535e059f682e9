"""Top-k, top-p and min-p on the device: ``logit_processors.cut_`` to the bit, without a sort and without waiting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.engine.cuda.attention import power_of_two
from specdec.engine.cuda.cut_kernels import CUT_WORDS, DIGITS, STATE_WORDS, cut_kernel, scale_kernel, search_kernel
from specdec.engine.cuda.launch import launch
from specdec.engine.cuda.sampling import device_perturbed_top
from specdec.engine.cuda.sampling_kernels import row_peak_kernel

NUM_CUT_WORDS = int(CUT_WORDS.value)
"""Number of int32 words of a row in the result of ``cut_parameters``."""
CutArguments = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""Rows' top-k, top-p and lowest score that min-p allows, from ``logit_processors.cut_arguments``."""
_PEAK_BLOCK = 1024
_BLOCK = 2048
_SHIFTS = tuple(range(28, -1, -4))


@dataclass(frozen=True, slots=True)
class CutKinds:
    """The cuts that need a search over the vocabulary, of eight launches each; min-p needs none."""

    has_top_k: bool = False
    has_top_p: bool = False


def cut_parameters(temperatures: Sequence[float], cuts: CutArguments, vocab_size: int) -> tuple[torch.Tensor, CutKinds]:
    """Rows' parameters for ``launch_cuts``, ``[R, 5]`` int32 on the host, and the kinds of their cuts.

    Args:
        temperatures: R values; 0 for a row that is not cut.
        cuts: cuts of R rows.
        vocab_size: number of tokens of a row.
    """
    top_k, top_p, min_score = cuts
    words = np.zeros((len(temperatures), NUM_CUT_WORDS), np.int32)
    words[:, 0] = np.array(temperatures, np.float32).view(np.int32)
    words[:, 1] = [min(k or vocab_size, vocab_size) for k in top_k]
    words[:, 2:4] = np.array(top_p, np.float64).view(np.int32).reshape(-1, 2)
    words[:, 4] = np.array(min_score, np.float32).view(np.int32)
    has_top_k = any(0 < k < vocab_size for k in top_k)
    return torch.from_numpy(words), CutKinds(has_top_k, any(p < 1.0 for p in top_p))


def launch_cuts(logits: torch.Tensor, cuts: torch.Tensor, kinds: CutKinds) -> torch.Tensor:
    """``(logit - best) / temperature`` with minus infinity for cut tokens, ``[R, V]``; no operation waits for data.

    Rows of temperature 0 keep their logits; other rows whose best logit is not finite are NaN throughout.
    Cost: three launches, and eight more for each of ``kinds``.

    Args:
        logits: ``[R, V]`` float32, not changed; copied if the tokens of a row are not contiguous.
        cuts: result of ``cut_parameters``, on the same device.
        kinds: kinds of the rows' cuts; more kinds change nothing but the cost.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.device
    num_peaks, num_chunks = -(-vocab_size // _PEAK_BLOCK), -(-vocab_size // _BLOCK)
    peaks = torch.empty(num_rows, num_peaks, dtype=torch.float32, device=device)
    scores = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    stride = logits.stride(0)
    launch(
        row_peak_kernel,
        (num_rows, num_peaks),
        logits,
        peaks,
        stride,
        VOCAB=vocab_size,
        BLOCK=_PEAK_BLOCK,
        options=options,
    )
    sizes: dict[str, Any] = {"VOCAB": vocab_size, "BLOCK": _BLOCK}
    grid = (num_rows, num_chunks)
    launch(
        scale_kernel,
        grid,
        logits,
        cuts,
        peaks,
        scores,
        stride,
        NUM_PEAKS=num_peaks,
        BLOCK_PEAKS=power_of_two(num_peaks),
        options=options,
        **sizes,
    )
    sizes |= {"NUM_CHUNKS": num_chunks, "BLOCK_CHUNKS": power_of_two(num_chunks)}
    searches = [by_weight for by_weight, is_on in ((False, kinds.has_top_k), (True, kinds.has_top_p)) if is_on]
    num_steps = max(1, len(searches) * len(_SHIFTS))
    states = torch.empty(num_steps, num_rows, int(STATE_WORDS.value), dtype=torch.int64, device=device)
    partials = torch.empty(num_steps, num_rows, num_chunks, int(DIGITS.value), dtype=torch.int64, device=device)
    step = 0
    for by_weight in searches:
        for shift in _SHIFTS:
            before = max(0, step - 1)
            launch(
                search_kernel,
                grid,
                scores,
                cuts,
                states[before],
                partials[before],
                states[step],
                partials[step],
                shift,
                BY_WEIGHT=by_weight,
                IS_FIRST=shift == _SHIFTS[0],
                FOLLOWS=step > 0,
                options=options,
                **sizes,
            )
            step += 1
    launch(
        cut_kernel,
        grid,
        scores,
        cuts,
        states[-1],
        partials[-1],
        HAS_TOP_K=kinds.has_top_k,
        HAS_TOP_P=kinds.has_top_p,
        options=options,
        **sizes,
    )
    return scores


def device_cuts(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    cuts: CutArguments,
) -> torch.Tensor:
    """``launch_cuts`` for parameters on the host. Cost: one more copy to the device."""
    words, kinds = cut_parameters(temperatures, cuts, logits.shape[1])
    return launch_cuts(logits, words.to(logits.device, non_blocking=True), kinds)


def compile_draws(num_logits: int, vocab_size: int, device: torch.device) -> None:
    """Draw once with every combination of cuts, so that no stream waits for the compiler.

    Cost: up to ten seconds if the kernels are not in the compiler's cache.

    Args:
        num_logits: columns of the model's logits.
        vocab_size: number of token ids; columns from here on are padding.
        device: device of the logits.
    """
    lowest = -math.inf
    for width in {num_logits, vocab_size}:  # the alignment of rows decides which variant is compiled
        logits = torch.zeros(1, width, device=device)[:, :vocab_size]
        device_perturbed_top(logits, [1.0], [0, 0], 1)
        for top_k, top_p in itertools.product((0, 1), (1.0, 0.5)):
            device_cuts(logits, [1.0], ([top_k], [top_p], [lowest]))
