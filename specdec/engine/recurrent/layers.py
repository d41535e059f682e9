"""Runs recurrent layers of an unmodified transformers model over committed states.

transformers writes every recurrent layer over a few functions: a causal convolution and a scan. A layer's methods are
rebuilt for the loaded model with ours in their place, so that projections, gates and norms stay the model's own.
transformers itself is not changed, and the recurrences need no keyword arguments, which some models drop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specdec.engine.recurrent.convolution import convolution_shape
from specdec.engine.recurrent.scans import Recurrences, ScanSizes
from specdec.engine.states.memory import CellShape, StateMemory
from specdec.engine.states.plan import StatePlan

RECURRENT_VERSION = 2
"""Part of the numerics id of models with recurrent layers: raise it whenever their bits change."""
_ATTRIBUTE = "_specdec_recurrent_layers"


class RecurrenceError(RuntimeError):
    """A layer called a recurrence in a way that the engine cannot serve."""


@dataclass(slots=True)
class _Pass:
    """States of one forward pass."""

    plan: StatePlan
    memory: StateMemory | None
    shapes: list[CellShape] = field(default_factory=list)
    """Of the recurrences so far, in the order of calls."""


class RecurrentLayers:
    """The recurrent layers of a model, if any, which it rebuilds permanently. See `of`."""

    def __init__(self, model: nn.Module) -> None:
        self.recurrences = Recurrences()
        self.shapes: list[CellShape] = []
        """Of the recurrences of a pass, once `running` has recorded one."""
        self.num_layers = 0
        self._pass: _Pass | None = None
        functions: dict[str, Callable[..., Any]] = {
            "causal_conv1d_fn": self._convolve,
            "torch_chunk_gated_delta_rule": self._gated_delta,
            "chunk_kimi_delta_attention": self._gated_delta,
            "mamba2_chunk_scan": self._state_space,
            "mamba_selective_scan": self._selective,
        }
        rebuilt = {kind: _rebuilt(kind, functions) for kind in {type(module) for module in model.modules()}}
        for module in model.modules():
            for name, method in rebuilt[type(module)].items():
                setattr(module, name, MethodType(method, module))
            self.num_layers += bool(rebuilt[type(module)])

    @classmethod
    def of(cls, model: nn.Module) -> RecurrentLayers:
        """The recurrent layers of a model, rebuilt at the first call."""
        found: RecurrentLayers | None = getattr(model, _ATTRIBUTE, None)
        if found is None:
            found = cls(model)
            setattr(model, _ATTRIBUTE, found)
        return found

    def __bool__(self) -> bool:
        return self.num_layers > 0

    @contextmanager
    def running(self, plan: StatePlan, memory: StateMemory | None) -> Iterator[None]:
        """Serve the recurrences of the pass inside. Without memory, nothing is read or saved."""
        self._pass = _Pass(plan, memory)
        try:
            yield
            self.shapes = self._pass.shapes
        finally:
            self._pass = None

    def _begin(self, shape: CellShape, num_rows: int) -> tuple[_Pass, int]:
        current = self._pass
        if current is None:
            raise RecurrenceError("a recurrent layer runs outside a pass")
        if num_rows != len(current.plan.kept):
            raise RecurrenceError(
                f"a recurrent layer reshapes the batch of {len(current.plan.kept)} rows to {num_rows}"
            )
        current.shapes.append(shape)
        return current, len(current.shapes) - 1

    def _convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """For ``causal_conv1d_fn``: ``[1, channels, T]``."""
        _check(kwargs, hidden_states)
        inputs = hidden_states[0].transpose(0, 1)
        current, cell = self._begin(convolution_shape(weight), len(inputs))
        result = self.recurrences.convolve(inputs, weight, bias, activation, current.plan, current.memory, cell)
        return result.transpose(0, 1).unsqueeze(0)

    def _gated_delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """For the gated delta rules of Qwen3-Next (a decay per head) and Kimi (a decay per key dimension)."""
        _check(kwargs, query)
        parts = [part[0] for part in (query, key, value, g, beta)]
        (num_keys, key_dim), (num_heads, value_dim) = parts[1].shape[1:], parts[2].shape[1:]
        sizes = ScanSizes(num_heads, num_keys, key_dim, value_dim, g.dim() == 4, is_delta=True)
        queries, rows = self.recurrences.delta_rows(sizes, parts, normalizes=use_qk_l2norm_in_kernel)
        return self._scan(sizes, queries, rows).to(query.dtype).unsqueeze(0), None

    def _state_space(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 (transformers' name)
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        chunk_size: int,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> torch.Tensor:
        """For ``mamba2_chunk_scan``: ``[1, T, heads, head_dim]``."""
        _check(kwargs, hidden_states)
        dt = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = nn.functional.softplus(dt)
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
        values, keys, query = (tensor[0].float() for tensor in (hidden_states, B, C))
        sizes = ScanSizes(values.shape[1], keys.shape[1], keys.shape[2], values.shape[2], False, is_delta=False)
        decay = (A.float() * dt).exp()
        result = self._scan(sizes, query, _joined(keys, values * dt.unsqueeze(-1), decay))
        if D is not None:
            result = result + values * D.float().view(-1, 1)
        return result.to(hidden_states.dtype).unsqueeze(0)

    def _selective(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """For ``mamba_selective_scan`` of Mamba 1: ``[1, channels, T]``; every channel is a head of one value."""
        _check(kwargs, hidden_states)
        values, dt, keys, query = (tensor[0].transpose(0, 1).float() for tensor in (hidden_states, dt, B, C))
        if delta_bias is not None:
            dt = dt + delta_bias.float()
        if delta_softplus:
            dt = nn.functional.softplus(dt)
        sizes = ScanSizes(values.shape[1], 1, keys.shape[1], 1, decays_per_key=False, is_delta=False)
        result = self._scan(sizes, query, _joined(keys, values * dt, dt), A.float()).squeeze(-1)
        if D is not None:
            result = result + values * D.float()
        if z is not None:
            result = result * nn.functional.silu(z[0].transpose(0, 1).float())
        return result.to(hidden_states.dtype).transpose(0, 1).unsqueeze(0)

    def _scan(
        self, sizes: ScanSizes, query: torch.Tensor, rows: torch.Tensor, rates: torch.Tensor | None = None
    ) -> torch.Tensor:
        current, cell = self._begin(sizes.shape, len(query))
        queries = query.flatten(1).contiguous()
        return self.recurrences.scan(sizes, queries, rows, rates, current.plan, current.memory, cell)


def has_served_recurrence(config: PreTrainedConfig) -> bool:
    """Whether a config's causal language model is written over functions that `RecurrentLayers` replaces."""
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return False
    return hasattr(inspect.getmodule(model_class), "causal_conv1d_fn")


def _rebuilt(of: type, functions: dict[str, Callable[..., Any]]) -> dict[str, FunctionType]:
    """A class's methods that call one of the functions, with these in their place."""
    found: dict[str, FunctionType] = {}
    for name, method in inspect.getmembers(of, inspect.isfunction):
        raw = inspect.unwrap(method)
        names = functions.keys() & raw.__code__.co_names
        if names:
            scope = {**raw.__globals__, **{each: functions[each] for each in names}}
            found[name] = FunctionType(raw.__code__, scope, raw.__name__, raw.__defaults__, raw.__closure__)
            found[name].__kwdefaults__ = raw.__kwdefaults__
    return found


def _check(options: dict[str, Any], batch: torch.Tensor) -> None:
    """Refuse what would change a recurrence: a state of transformers' own, packed sequences, another batch."""
    for name in ("initial_state", "initial_states", "cu_seqlens", "seq_idx", "z"):
        if options.get(name) is not None:
            raise RecurrenceError(f"a recurrent layer passes {name}")
    if batch.shape[0] != 1:
        raise RecurrenceError(f"a recurrent layer reshapes the batch: {tuple(batch.shape)}")


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1)
