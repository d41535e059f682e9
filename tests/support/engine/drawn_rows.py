"""Rows of a draft that draws several tokens per call, and their logits."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.batch import build_batch
from specdec.engine.drawing.rows import DrawRow, DrawRule
from specdec.engine.runner import Runner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.scheduler import ScheduledItem, ScheduledStep
from specdec.engine.sequence import Sequence
from specdec.wire.sampling_params import SamplingParams

BLOCK_SIZE, BLOCKS_EACH, NUM_TOP = 4, 10, 3
PROMPTS = [[5, 6, 7], [9], list(range(20))]
MANY: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 9}, {"temperature": 0.6, "choice": 2}]


def blocks_of(line: int) -> array[int]:
    return array("i", range(line * BLOCKS_EACH, (line + 1) * BLOCKS_EACH))


def logits_of(runner: Runner, token_ids: list[int], line: int, start: int = 0) -> torch.Tensor:
    seq = Sequence(seq_id=0, token_ids=token_ids, num_prompt_tokens=len(token_ids), block_ids=blocks_of(line))
    item = ScheduledItem(seq, start, len(token_ids) - start, 0, completes=True)
    return runner.forward(build_batch(ScheduledStep([item]), BLOCK_SIZE, "cpu")[0])


def numbers_of(
    temperatures: list[float], cuts: list[tuple[int, float, float]] | None = None, vocab_size: int = 0
) -> npt.NDArray[np.float64]:
    """`row_numbers` of rows with a temperature, 0 if greedy, and with top-k, top-p and least score; None: no cuts."""
    cuts = cuts or [(0, 1.0, -math.inf)] * len(temperatures)
    return np.array(
        [
            (1.0, temperature, min(top_k or vocab_size, vocab_size), *others)
            if temperature
            else (0.0, 1.0, vocab_size, 1.0, -math.inf)
            for temperature, (top_k, *others) in zip(temperatures, cuts, strict=True)
        ]
    )


def rows_of(rounds: list[int], many: list[dict[str, Any]], **options: Any) -> list[DrawRow]:
    rows = []
    for line, (prompt, each, num_rounds) in enumerate(zip(PROMPTS, many, rounds, strict=True)):
        rule = DrawRule(SamplingParams(**{"max_tokens": 100, "seed": 3, **each}))
        rows.append(DrawRow(rule, line, len(prompt), num_rounds, blocks_of(line), **options))
    return rows


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"presence_penalty": 1.0, "logit_bias": {7: 3.0, 11: -100.0}, "top_k": 20},
    {"min_tokens": 3, "eos_token_ids": tuple(range(0, 131, 2))},
    {"allowed_token_ids": tuple(range(0, 131, 5)), "frequency_penalty": 2.0, "temperature": 0.0},
]


def adjusted_rows(rounds: list[int], many: list[dict[str, Any]]) -> list[DrawRow]:
    rows = rows_of(rounds, many)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        if row.rule.params.adjusts_logits:
            row.adjusting = RowContext(row.rule.params, row.position, len(prompt), TokenHistory(prompt))
    return rows
