"""Kernels that draw tokens on a GPU are compiled before the first request: all would wait for seconds."""

from __future__ import annotations

from typing import Any

import torch

from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.sampling_params import SamplingParams

_CUTS: tuple[dict[str, Any], ...] = ({}, {"min_p": 0.5}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5})
"""Each leads to other kernels."""


def compile_draws(sampler: Sampler, num_logits: int) -> None:
    """Draw from a row of zeros in every way in which `Sampler.sample` does; nothing is left to do on a CPU.

    ``num_logits``: columns of the logits that will come.
    """
    if sampler.device.type != "cuda":
        return
    logits = torch.zeros(1, num_logits, device=sampler.device)
    for cuts in _CUTS:
        params = SamplingParams(max_tokens=1, seed=0, temperature=1.0, **cuts)
        sampler.sample(logits, [RowContext(params, 0, 0)])
