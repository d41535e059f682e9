"""Rows of random logits, and samplers with and without the native kernels."""

from __future__ import annotations

import math
from typing import Any

import torch

from specdec.engine.sampling.sampler import RowContext, Sampler, TokenHistory
from specdec.wire.sampling_params import SamplingParams

VOCAB_SIZE = 300
PROMPT = [5, 9, 9, 250]
OUTPUT = [7, 9, 7, 7, 120]


def make_sampler(vocab_size: int, path: str) -> Sampler:
    return Sampler(vocab_size, "cpu", native="on" if path == "native" else "off")


def make_row(position: int | None = None, extra_tokens: tuple[int, ...] = (), **changed: Any) -> RowContext:
    history = TokenHistory(PROMPT)
    history.append(OUTPUT)
    if position is None:
        position = len(history) + len(extra_tokens)
    defaults: dict[str, Any] = {"seed": 17, "max_tokens": 99}
    return RowContext(
        params=SamplingParams(**{**defaults, **changed}),
        position=position,
        num_prompt_tokens=len(PROMPT),
        history=history,
        extra_tokens=extra_tokens,
    )


def make_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def kept(scores: torch.Tensor) -> torch.Tensor:
    return scores > -math.inf
