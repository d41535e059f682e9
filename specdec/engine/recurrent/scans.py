"""Recurrences of a matrix per head: gated delta rules (Qwen3-Next, Kimi) and state-space scans (Mamba 1 and 2).

For a state ``S[K, V]`` of one head and a token with key, value, decay, and for delta rules a strength:

    S = decay * S
    S = S + key (value - S^T key) * strength     # delta rule
    S = S + key value                            # state space
    output = S^T query

Row-invariant: every token is one step of the same operations on the same shapes, in any batch; chunks are not joined
into products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.engine.recurrent.convolution import convolve
from specdec.engine.states.memory import CellShape, StateMemory
from specdec.engine.states.plan import StatePlan


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """Sizes of one scan."""

    num_heads: int
    num_key_heads: int
    """Key heads; each serves adjacent heads."""
    key_dim: int
    value_dim: int
    decays_per_key: bool
    """Whether a token has one decay per head and key dimension, not per head."""
    is_delta: bool

    @property
    def shape(self) -> CellShape:
        """Sizes in memory."""
        return CellShape((self.num_heads, self.key_dim, self.value_dim), sum(self.widths))

    @property
    def widths(self) -> list[int]:
        """Numbers of a token's keys, values, decays and strengths, in the order of a row of kept inputs."""
        decays = self.num_heads * (self.key_dim if self.decays_per_key else 1)
        return [
            self.num_key_heads * self.key_dim,
            self.num_heads * self.value_dim,
            decays,
            self.num_heads if self.is_delta else 0,
        ]


class Recurrences:
    """Computes a model's recurrences, in torch."""

    def convolve(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        plan: StatePlan,
        memory: StateMemory | None,
        cell: int,
    ) -> torch.Tensor:
        """See `convolve`."""
        return convolve(inputs, weight, bias, activation, plan, memory, cell)

    def delta_rows(
        self, sizes: ScanSizes, parts: Sequence[torch.Tensor], *, normalizes: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries and rows of a delta rule's scan.

        Args:
            sizes: the scan's.
            parts: query, key, value, logarithms of decays and strengths, each ``[T, ...]``.
            normalizes: give queries and keys the length 1.
        """
        query, key, value, decay, strength = (part.float() for part in parts)
        if normalizes:
            query, key = _normalized(query), _normalized(key)
        query = query * sizes.key_dim**-0.5
        rows = torch.cat([part.flatten(1) for part in (key, value, decay.exp(), strength)], dim=1)
        return query.flatten(1).contiguous(), rows

    def scan(
        self,
        sizes: ScanSizes,
        query: torch.Tensor,
        rows: torch.Tensor,
        rates: torch.Tensor | None,
        plan: StatePlan,
        memory: StateMemory | None,
        cell: int,
    ) -> torch.Tensor:
        """Take queries ``[T, key heads * key_dim]`` and rows of kept inputs ``[T, width]``, float32 and contiguous.

        ``rates`` ``[heads, key_dim]``, for states of one value per head: a token's decays are e to the power of them
        times its number per head. Returns outputs ``[T, heads, value_dim]`` float32; saves states and keeps rows as the
        plan says.
        """
        return _scan(sizes, query, rows, rates, plan, memory, cell)


def _normalized(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6)


def _scan(
    sizes: ScanSizes,
    query: torch.Tensor,
    rows: torch.Tensor,
    rates: torch.Tensor | None,
    plan: StatePlan,
    memory: StateMemory | None,
    cell: int,
) -> torch.Tensor:
    """`Recurrences.scan`: some tens of microseconds per token and layer."""
    queries = query.view(len(rows), sizes.num_key_heads, sizes.key_dim)
    groups = sizes.num_heads // sizes.num_key_heads
    out = rows.new_empty(len(rows), sizes.num_heads, sizes.value_dim)

    def after(state: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        key, value, decay, strength = row.split(sizes.widths)
        keys = key.view(sizes.num_key_heads, -1, 1).repeat_interleave(groups, 0)
        values = value.view(sizes.num_heads, 1, -1)
        decays = decay.view(sizes.num_heads, -1, 1)
        state = state * (decays if rates is None else (decays * rates.unsqueeze(-1)).exp())
        if sizes.is_delta:
            held = (state * keys).sum(1, keepdim=True)
            values = (values - held) * strength.view(-1, 1, 1)
        return state + keys * values

    def read(state: torch.Tensor, row: int) -> None:
        out[row] = (state * queries[row].unsqueeze(-1).repeat_interleave(groups, 0)).sum(1)

    for span in plan.spans:
        state = rows.new_zeros(sizes.shape.state)
        if memory is not None and span.read_slot >= 0:
            state = memory.states[cell][span.read_slot].clone()
        new = rows[span.first_row : span.first_row + span.num_new]
        repeated = memory.kept[cell][span.repeated] if memory is not None and span.repeated else rows[:0]
        for done, row in enumerate((*repeated, *new), 1):
            state = after(state, row)
            if done > len(repeated):
                read(state, span.first_row + done - len(repeated) - 1)
            if memory is not None and done == span.save_after and span.write_slot >= 0:
                memory.states[cell][span.write_slot] = state
        states = [state]
        for node, depth in span.order:
            row_number = span.first_row + span.num_new + node
            del states[depth:]
            states.append(after(states[depth - 1], rows[row_number]))
            read(states[depth], row_number)
    if memory is not None:
        kept, places = plan.kept_rows
        memory.kept[cell][places] = rows[kept]
    return out
