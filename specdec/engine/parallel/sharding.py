"""Splits a model by transformers' tensor-parallel plan: transformers reads the shards, our modules run them.

transformers reads only a rank's part of each file. But it runs shards through wrappers that cost much Python per layer,
hide linear layers from packing, and sum in an order that depends on the batch. So only its plan and weights are used;
the modules are those of ``sharded_modules.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.engine.errors import ModelLoadError
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.parallel.sharded_modules import GatheredLinear, RowSplitLinear, SummedOutput, VocabSplitEmbedding

_COLUMN_STYLES = frozenset({"colwise"})
_GATHERED_STYLES = frozenset({"colwise_gather_output", "colwise_rep"})
_ROW_STYLES = frozenset({"rowwise"})
_WHOLE_INPUT_STYLES = frozenset({"rowwise_split_input", "rowwise_rep"})
_EMBEDDING_STYLES = frozenset({"embedding_rowwise"})
_EXPERT_STYLES = frozenset({"moe_tp_experts"})
_WHOLE_STYLES = frozenset({"replicated_with_grad_allreduce", "replicate"})
_PARAMETER_STYLES = frozenset({"packed_colwise", "colwise", "rowwise"})
_MODULE_STYLES = frozenset().union(
    _COLUMN_STYLES,
    _GATHERED_STYLES,
    _ROW_STYLES,
    _WHOLE_INPUT_STYLES,
    _EMBEDDING_STYLES,
    _EXPERT_STYLES,
    _WHOLE_STYLES,
)


class TensorParallelRefused(ModelLoadError):
    """A ``tensor_parallel_size`` that the model or the machine does not allow."""

    def __init__(self, size: int, reason: str) -> None:
        super().__init__(f"tensor_parallel_size: {size} {reason}")


def check_plan(config: PreTrainedConfig, size: int, trust_remote_code: bool) -> None:
    """Check that the model's plan allows ``size`` ranks, before weights are read.

    Raises ``TensorParallelRefused``. Cost: the model without weights, about a second for a large one.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    architecture = type(model).__name__
    plan: Mapping[str, str] = model.tp_plan or {}
    if not any("*" in name for name in plan):
        raise TensorParallelRefused(
            size, f"ranks are not possible: transformers has no plan for the layers of {architecture}"
        )
    if any(style in _COLUMN_STYLES and "att" in name for name, style in plan.items()):
        text = config.get_text_config()
        heads = text.num_attention_heads
        _check_divides(size, heads, f"attention heads of {architecture}")
        _check_divides(size, getattr(text, "num_key_value_heads", None) or heads, f"KV heads of {architecture}")
    for name, style in plan.items():
        if style not in _MODULE_STYLES | _PARAMETER_STYLES:
            raise TensorParallelRefused(size, f"ranks are not possible: style {style!r} of {name} is not supported")
    for name, module, style in _planned_modules(model, plan):
        if style in _COLUMN_STYLES:
            _check_divides(size, module.out_features, f"outputs of {name}")
        elif style in _ROW_STYLES | _WHOLE_INPUT_STYLES:
            _check_divides(size, module.in_features, f"inputs of {name}")
    for name, parameter, style in _planned_parameters(model, plan):
        if style == "rowwise":
            _check_divides(size, parameter.shape[-1], f"columns of {name}")
        else:
            num_parts = 2 if style == "packed_colwise" else 1
            _check_divides(size, parameter.shape[-2] // num_parts, f"rows of {name}")


def shard_model(model: PreTrainedModel, group: RankGroup) -> None:
    """Replace the modules of a model whose parameters are ``DTensor`` shards, in place."""
    plan: Mapping[str, str] = model.tp_plan
    for module in model.modules():
        module.__dict__.pop("forward", None)  # removes transformers' wrapper
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                local = nn.Parameter(parameter.to_local(), requires_grad=False)
                module.register_parameter(name, local)
    for name, module, style in list(_planned_modules(model, plan)):
        new = _replacement(module, style, group)
        if new is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)


def _replacement(module: nn.Module, style: str, group: RankGroup) -> nn.Module:
    if style in _EXPERT_STYLES:
        return SummedOutput(module, group)
    if isinstance(module, nn.Embedding):
        return VocabSplitEmbedding(module, group)
    if not isinstance(module, nn.Linear) or style in _WHOLE_STYLES:
        return module
    num_outputs = module.out_features
    module.out_features, module.in_features = module.weight.shape
    if style in _GATHERED_STYLES:
        return GatheredLinear(module, group, num_outputs)
    if style in _ROW_STYLES | _WHOLE_INPUT_STYLES:
        return RowSplitLinear(module, group, splits_input=style in _WHOLE_INPUT_STYLES)
    return module


def _planned_modules(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and style of each module in the plan."""
    for name, module in model.named_modules():
        if (style := plan.get(_pattern_of(name))) is not None:
            yield name, module, style


def _planned_parameters(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Name, parameter and style of each parameter in the plan: experts' stacked weights."""
    for name, parameter in model.named_parameters():
        if (style := plan.get(_pattern_of(name))) is not None:
            yield name, parameter, style


def _pattern_of(name: str) -> str:
    """The name with layer numbers replaced by the plan's wildcard."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_divides(size: int, count: Any, what: str) -> None:
    if count % size:
        raise TensorParallelRefused(size, f"does not divide the {count} {what}")
