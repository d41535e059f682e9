"""Short causal convolutions over the inputs of a sequence's last tokens."""

from __future__ import annotations

import torch
from transformers.activations import ACT2FN

from specdec.engine.states.memory import CellShape, StateMemory
from specdec.engine.states.plan import StatePlan


def convolution_shape(weight: torch.Tensor) -> CellShape:
    """Sizes for a weight ``[channels, width]``: the last ``width - 1`` inputs are the state."""
    channels, width = weight.shape
    return CellShape((width - 1, channels), channels)


def convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    plan: StatePlan,
    memory: StateMemory | None,
    cell: int,
) -> torch.Tensor:
    """Outputs ``[T, channels]`` for inputs ``[T, channels]``; a row's window are its sequence's last inputs.

    Row-invariant: each output is a sum of products in the order of the window.
    """
    width = weight.shape[1]
    before = width - 1
    rows = inputs.float()
    sources = torch.cat([_begun(plan, memory, cell, before, rows), *_repeated(plan, memory, cell), rows])
    window, saved = plan.window(before)
    taps = weight.float()
    result = rows * taps[:, before]
    for place in range(before):
        result = result + sources[window[:, place]] * taps[:, place]
    if bias is not None:
        result = result + bias.float()
    if memory is not None:
        if len(saved):
            memory.states[cell][plan.written] = sources[saved]
        kept, places = plan.kept_rows
        memory.kept[cell][places] = rows[kept]
    if activation is not None:
        result = ACT2FN[activation](result)
    return result.to(inputs.dtype)


def _begun(plan: StatePlan, memory: StateMemory | None, cell: int, before: int, rows: torch.Tensor) -> torch.Tensor:
    """Inputs in the states that spans begin with, ``[spans * before, channels]``; zeros before a sequence's start."""
    begun = rows.new_zeros(len(plan.spans), before, rows.shape[1])
    if memory is not None:
        has_state = plan.read >= 0
        begun[has_state] = memory.states[cell][plan.read[has_state]]
    return begun.flatten(0, 1)


def _repeated(plan: StatePlan, memory: StateMemory | None, cell: int) -> list[torch.Tensor]:
    return [memory.kept[cell][plan.repeated]] if memory is not None and len(plan.repeated) else []
