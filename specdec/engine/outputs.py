"""Outputs of the engine's steps, and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.engine.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class ItemOutput:
    """One sequence's share of a step."""

    seq: Sequence
    rows: slice
    """Its rows of the logits: [last token, node 0, ...] if it completes; with prompt logits, after the chunk's other
    rows.
    """
    start: int
    """Position of the first token computed."""
    num_new_tokens: int
    """Number of computed tokens. Zero only for a tree below an already computed token, whose row is missing in
    `rows`.
    """
    tree_nodes: int
    """Number of leading nodes of the sequence's tree that were verified."""
    completes: bool
    """Whether no token of the sequence is pending afterwards."""
    batch_rows: slice
    """Its rows of the batch: its new tokens, then its nodes."""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """The output of one step. On a GPU its kernels may still run."""

    logits: torch.Tensor
    """[R, V] float32 on the runner's device."""
    items: list[ItemOutput]
    """Shares of the sequences."""
    preempted: list[Sequence]
    """Sequences that gave up their blocks for the step."""
    num_tokens: int
    """Rows of the batch."""
    hidden: torch.Tensor | None = None
    """[num_tokens, layers of the tap, hidden size] hidden states of all rows; None without a tap."""
    gap_s: Callable[[], float | None] = lambda: None
    """`LaunchedPass.gap_s` of a launched pass; otherwise returns None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Present gauges, and counters since the start."""

    blocks_used: int
    blocks_cached: int
    blocks_total: int
    running: int
    """Sequences that hold blocks."""
    waiting: int
    """Sequences that hold none."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    rollbacks: int
    rollback_tokens: int
    num_graphs: int
    """Captured graphs of a GPU."""
    memory_faults: int
    """Steps for which the device had too little free memory."""
