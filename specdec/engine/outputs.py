"""What a step of the engine gives back, and the engine's gauges."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.sequence import Sequence


@dataclass(slots=True)
class ItemOutput:
    """One sequence's share of a step.

    Attributes:
        seq: the sequence.
        rows: its rows of the logits: [last token, node 0, ...] if it completes, after every other row of the
            chunk if it wants prompt logits.
        start: position of the first token computed.
        num_new_tokens: tokens computed; zero only for a tree below a token that was computed before, whose
            row is then missing from `rows`.
        tree_nodes: leading nodes of the sequence's tree that were verified.
        completes: no token of the sequence was pending afterwards.
    """

    seq: Sequence
    rows: slice
    start: int
    num_new_tokens: int
    tree_nodes: int
    completes: bool


@dataclass(slots=True)
class StepOutput:
    """Logits [R, V] float32 on the runner's device, and whose they are.

    `num_tokens` is the rows of the batch. `elapsed_s` runs from `started_s` (of time.perf_counter) until the runner
    returned: on a GPU the kernels may still run.
    """

    logits: torch.Tensor
    items: list[ItemOutput]
    preempted: list[Sequence]
    num_tokens: int
    started_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the gauges and the counters since the start."""

    blocks_used: int
    blocks_cached: int
    blocks_total: int
    running: int
    waiting: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    rollbacks: int
    rollback_tokens: int
