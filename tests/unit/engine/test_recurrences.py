"""Recurrences in C++ are those in torch, and element-wise functions are replaced where they are called only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec.engine.model.mixtures import functions as module
from specdec.engine.model.mixtures.functions import InvariantFunctions, make_functions_row_invariant
from specdec.engine.native.kernels import NativeKernels
from specdec.engine.recurrent.convolution import convolution_shape
from specdec.engine.recurrent.native import NativeRecurrences
from specdec.engine.recurrent.scans import Recurrences, ScanSizes
from specdec.engine.states.memory import StateMemory
from specdec.engine.states.plan import StatePlan, plan_of
from specdec.engine.states.sessions import ItemStates
from tests.support.engine.paged_attention import random_rows
from tests.support.for_each import for_each

CPU = torch.device("cpu")


def plan() -> StatePlan:
    """A sequence from a state with repeated inputs, new tokens and a tree; a new one; one that overwrites its state."""
    first = ItemStates(
        read_slot=1, write_slot=2, save_after=3, repeated=[4, 2], kept=[-1, 0, 1, 3, 5], num_new_tokens=2,
        parents=[-1, 0, -1],
    )  # fmt: skip
    second = ItemStates(
        read_slot=-1, write_slot=0, save_after=1, repeated=[], kept=[-1, 6], num_new_tokens=2, parents=[]
    )
    third = ItemStates(read_slot=3, write_slot=3, save_after=1, repeated=[], kept=[-1], num_new_tokens=1, parents=[])
    return plan_of([first, second, third])


def memory(state: tuple[int, ...], kept_width: int) -> StateMemory:
    from specdec.engine.states.memory import CellShape

    made = StateMemory([CellShape(state, kept_width)], 4, 8, CPU)
    for number, tensor in enumerate((*made.states, *made.kept)):
        tensor.copy_(random_rows(len(tensor), tensor[0].numel(), seed=number).view(tensor.shape))
    made.kept[0].abs_()  # decays are positive
    return made


def same(one: StateMemory, other: StateMemory) -> None:
    torch.testing.assert_close(one.states[0], other.states[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.kept[0], other.kept[0], rtol=1e-6, atol=1e-6)


SIZES = (
    ScanSizes(4, 2, 16, 8, decays_per_key=False, is_delta=True),
    ScanSizes(2, 2, 5, 83, decays_per_key=True, is_delta=True),  # a tile, whole vectors and the rest of one
    ScanSizes(6, 1, 33, 64, decays_per_key=False, is_delta=False),
    ScanSizes(9, 1, 19, 1, decays_per_key=False, is_delta=False),  # Mamba 1
)


@for_each("sizes", SIZES)
@for_each("num_threads", (1, 3))
def test_scans_are_those_in_torch(sizes: ScanSizes, num_threads: int) -> None:
    rows = random_rows(8, sum(sizes.widths)).abs()
    query = random_rows(8, sizes.num_key_heads * sizes.key_dim, seed=1)
    rates = -random_rows(sizes.num_heads, sizes.key_dim, seed=2).abs() if sizes.value_dim == 1 else None
    found = []
    for recurrences in (Recurrences(), NativeRecurrences(NativeKernels(num_threads))):
        store = memory(sizes.shape.state, sizes.shape.kept_width)
        found.append((recurrences.scan(sizes, query, rows, rates, plan(), store, 0), store))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    same(found[0][1], found[1][1])


@for_each("channels", (1, 16, 83))
@for_each("activation", (None, "silu", "gelu"))
def test_convolutions_are_those_in_torch(channels: int, activation: str | None) -> None:
    weight, wide = random_rows(channels, 4, seed=3), random_rows(8, channels + 5, seed=4)
    found = []
    for recurrences in (Recurrences(), NativeRecurrences(NativeKernels(2))):
        shape = convolution_shape(weight)
        store = memory(shape.state, shape.kept_width)
        bias = random_rows(1, channels, seed=5)[0]
        out = recurrences.convolve(wide[:, 2 : 2 + channels], weight, bias, activation, plan(), store, 0)
        found.append((out, store))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    same(found[0][1], found[1][1])


@for_each("normalizes", (True, False))
def test_rows_of_a_delta_rule_are_those_in_torch(normalizes: bool) -> None:
    sizes = SIZES[1]
    shapes = ((2, 5), (2, 5), (2, 83), (2, 5), (2,))
    parts = [
        random_rows(7, 170, seed=each)[:, : torch.Size(s).numel()].unflatten(1, s) for each, s in enumerate(shapes)
    ]
    one, other = (
        recurrences.delta_rows(sizes, parts, normalizes=normalizes)
        for recurrences in (Recurrences(), NativeRecurrences(NativeKernels(2)))
    )
    for wanted, found in zip(one, other, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def gated(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated(x)


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def test_functions_are_replaced_where_a_modules_code_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    dispatch = InvariantFunctions.__torch_function__

    def counting(mode: InvariantFunctions, func: module.Function, *rest: object) -> object:
        calls.append(getattr(func, "__name__", ""))
        return dispatch(mode, func, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(InvariantFunctions, "__torch_function__", counting)
    model = nn.Sequential(Norm(), Gate())
    for _ in range(2):
        make_functions_row_invariant(model)
    rows = random_rows(5, 67)
    with torch.inference_mode():
        whole = model(rows)
        for count in range(1, 5):
            assert torch.equal(model(rows[:count]), whole[:count])
    assert calls.count("sigmoid") == 5
    assert not {"rsqrt", "mean"}.intersection(calls)
