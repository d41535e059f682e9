"""What a step of the engine gives back, and the engine's gauges."""

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
    """Its rows of the logits: [last token, node 0, ...] if it completes, after every other row of the chunk if it wants
    prompt logits."""
    start: int
    """Position of the first token computed."""
    num_new_tokens: int
    """Tokens computed; zero only for a tree below a token that was computed before, whose row is then missing from
    `rows`."""
    tree_nodes: int
    """Leading nodes of the sequence's tree that were verified."""
    completes: bool
    """No token of the sequence was pending afterwards."""
    batch_rows: slice
    """Its rows of the batch: its new tokens, then its nodes."""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """What one step computed. On a GPU its kernels may still run."""

    logits: torch.Tensor
    """[R, V] float32 on the runner's device."""
    items: list[ItemOutput]
    """Whose they are."""
    preempted: list[Sequence]
    """Sequences that gave up their blocks for the step."""
    num_tokens: int
    """Rows of the batch."""
    hidden: torch.Tensor | None = None
    """[num_tokens, layers of the tap, hidden size], of all rows of the batch; None without a tap."""
    gap_s: Callable[[], float | None] = lambda: None
    """`LaunchedPass.gap_s` of the pass, where it was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot: gauges of now, and counters since the start."""

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
