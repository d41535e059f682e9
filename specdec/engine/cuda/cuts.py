"""Top-k, top-p and min-p on the device: ``logit_processors.cut_`` to the bit, without a sort and without waiting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.engine.cuda.attention import power_of_two
from specdec.engine.cuda.cut_kernels import CUT_NUMBERS, DIGITS, STATE_WORDS, cut_kernel
from specdec.engine.cuda.launch import launch
from specdec.engine.cuda.sampling import device_perturbed_top

NUM_CUT_NUMBERS = int(CUT_NUMBERS.value)
"""Number of float64 numbers of a row in the result of ``cut_parameters``."""
CutArguments = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""Rows' top-k, top-p and lowest score that min-p allows, from ``logit_processors.cut_arguments``."""
_BLOCK = 2048
_NUM_STEPS = 8


class CutKinds(NamedTuple):
    """The cuts that need a search over the vocabulary, of nine launches each; min-p needs none."""

    has_top_k: bool = False
    has_top_p: bool = False


def cut_parameters(temperatures: Sequence[float], cuts: CutArguments, vocab_size: int) -> tuple[torch.Tensor, CutKinds]:
    """Rows' parameters for ``launch_cuts``, ``[R, 4]`` float64 on the host, and the kinds of their cuts.

    Args:
        temperatures: R values; 0 for a row that is not cut.
        cuts: cuts of R rows.
        vocab_size: number of tokens of a row.
    """
    numbers = np.empty((len(temperatures), NUM_CUT_NUMBERS))
    top_k = [min(k or vocab_size, vocab_size) for k in cuts[0]]
    numbers.T[:] = temperatures, top_k, *cuts[1:]
    numbers[numbers[:, 0] == 0.0] = 0.0, vocab_size, 1.0, -math.inf
    return torch.from_numpy(numbers), CutKinds(
        bool((numbers[:, 1] < vocab_size).any()), bool((numbers[:, 2] < 1.0).any())
    )


def launch_cuts(logits: torch.Tensor, cuts: torch.Tensor, kinds: CutKinds) -> torch.Tensor:
    """``(logit - best) / temperature`` with minus infinity for cut tokens, ``[R, V]``; no operation waits for data.

    Rows of temperature 0 keep their logits; other rows whose best logit is not finite are NaN throughout.
    Cost: ten of torch's small operations, and nine launches for each of ``kinds``. One program per row would take one
    launch, but a row's 0.5 MB pass through one multiprocessor at 0.1 TB/s: 5 us for each of its passes, and 40 us where
    it computes weights, of which a search needs eight.

    Args:
        logits: ``[R, V]`` float32, not changed.
        cuts: result of ``cut_parameters``, on the same device.
        kinds: kinds of the rows' cuts; more kinds change nothing but the cost.
    """
    num_rows, vocab_size = logits.shape
    temperature, _, _, least = cuts.float().unsqueeze(2).unbind(1)
    is_greedy = temperature == 0.0
    best = logits.amax(dim=1, keepdim=True)
    best = (best - best * 0.0).masked_fill_(is_greedy, 0.0)  # NaN where it is not finite
    scores = (logits - best).div_(temperature.masked_fill(is_greedy, 1.0))
    num_chunks = -(-vocab_size // _BLOCK)
    states = torch.empty(_NUM_STEPS, num_rows, int(STATE_WORDS.value), dtype=torch.int64, device=logits.device)
    shape = (_NUM_STEPS, num_rows, num_chunks, int(DIGITS.value))
    partials = torch.empty(shape, dtype=torch.int64, device=logits.device)
    searches = [by_weight for by_weight, is_on in enumerate(kinds) if is_on]
    for by_weight, step in itertools.product(searches, range(_NUM_STEPS + 1)):
        launch(
            cut_kernel,
            (num_rows, num_chunks),
            scores,
            cuts,
            states,
            partials,
            step,
            num_rows,
            VOCAB=vocab_size,
            NUM_CHUNKS=num_chunks,
            BLOCK=_BLOCK,
            BLOCK_CHUNKS=power_of_two(num_chunks),
            BY_WEIGHT=bool(by_weight),
            IS_FIRST=step == 0,
            IS_LAST=step == _NUM_STEPS,
            options={"num_warps": 4, "enable_fp_fusion": False},
        )
    return scores.masked_fill_(scores < least, -math.inf)


def device_cuts(logits: torch.Tensor, temperatures: Sequence[float], cuts: CutArguments) -> torch.Tensor:
    """``launch_cuts`` for parameters on the host. Cost: one more copy to the device."""
    numbers, kinds = cut_parameters(temperatures, cuts, logits.shape[1])
    return launch_cuts(logits, numbers.to(logits.device, non_blocking=True), kinds)


def compile_draws(num_logits: int, vocab_size: int, device: torch.device) -> None:
    """Draw once with every combination of cuts, so that no stream waits for the compiler.

    Cost: up to ten seconds if the kernels are not in the compiler's cache.

    Args:
        num_logits: columns of the model's logits.
        vocab_size: number of token ids; columns from here on are padding.
        device: device of the logits.
    """
    for width in {num_logits, vocab_size}:  # the alignment of rows decides which variant is compiled
        logits = torch.zeros(1, width, device=device)[:, :vocab_size]
        device_perturbed_top(logits, [1.0], [0, 0], 1)
        device_cuts(logits, [1.0], ([1], [0.5], [-math.inf]))
