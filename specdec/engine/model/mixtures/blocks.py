"""Finds a model's mixtures of experts and replaces their products by row-invariant ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from specdec.engine.model.linear import WeightPacker, make_modules_row_invariant
from specdec.engine.model.mixtures.functions import make_block_row_invariant
from specdec.engine.model.mixtures.weights import Activation, ExpertsPacker, ExpertWeights, PackedExperts
from specdec.engine.parallel.sharded_modules import SummedOutput

_STACKED = ("gate_up_proj", "up_proj", "down_proj")
_PLAIN_GATE = moe._default_apply_gate


def make_model_row_invariant(model: nn.Module, pack: WeightPacker, pack_experts: ExpertsPacker) -> int:
    """Replace the products of a float32 CPU model, in place; see ``make_modules_row_invariant``. Returns the number of
    mixtures.

    Mixtures whose class transformers' own kernels could not run are left as they are.
    """
    blocks = []
    for block, experts in list(find_mixtures(model)):
        blocks.append(block)
        _replace(experts, pack_experts)
    make_modules_row_invariant(model, pack)
    for block in blocks:
        make_block_row_invariant(block, pack)
    return len(blocks)


def find_mixtures(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """All modules with experts' stacked weights in a known form, each with the block that calls it."""
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for module in model.modules():
        if not _is_known(module):
            continue
        block = parents[module]
        while isinstance(block, SummedOutput):
            block = parents[block]
        yield block, module


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, Llama4TextExperts | Step3p7Experts):
        return True
    if isinstance(module, LongcatFlashExperts):
        return module.gate_up_proj is not None
    return hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", True)


def _replace(experts: Any, pack: ExpertsPacker) -> None:
    packed = pack(weights_of(experts))
    for name in _STACKED:
        if getattr(experts, name, None) is not None:
            setattr(experts, name, None)  # frees the originals
    experts.forward = _forward_of(experts, packed)


def weights_of(experts: Any) -> ExpertWeights:
    """A mixture's weights in one form."""
    has_gate, has_bias = getattr(experts, "has_gate", True), getattr(experts, "has_bias", False)
    name = "gate_up_proj" if has_gate else "up_proj"
    up, down = getattr(experts, name).detach(), experts.down_proj.detach()
    if getattr(experts, "is_transposed", isinstance(experts, Llama4TextExperts)):
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    has_plain_gate = has_gate and getattr(type(experts), "_apply_gate", _PLAIN_GATE) is _PLAIN_GATE
    return ExpertWeights(
        up[: len(down)],  # LongCat's has rows for experts without weights
        down,
        getattr(experts, f"{name}_bias").detach() if has_bias else None,
        experts.down_proj_bias.detach() if has_bias else None,
        is_gated=has_plain_gate and not has_bias and isinstance(experts.act_fn, nn.SiLU | SiLUActivation),
    )


def _activation_of(experts: Any) -> Activation:
    """The activation, which reads the module's own in each call, as they are replaced later."""
    if not getattr(experts, "has_gate", True):
        return lambda up: experts.act_fn(up)
    gate = getattr(type(experts), "_apply_gate", _PLAIN_GATE)
    return partial(gate, experts)


def _forward_of(experts: Any, packed: PackedExperts) -> Callable[..., torch.Tensor]:
    activate = _activation_of(experts)
    num_experts = _num_experts(experts)

    def mix(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return packed(hidden_states, top_k_index, top_k_weights, activate)

    def mix_with_identity(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        kept = (top_k_weights * (top_k_index >= num_experts)).sum(-1, keepdim=True)
        return mix(hidden_states, top_k_index, top_k_weights) + hidden_states * kept

    def mix_all(hidden_states: torch.Tensor) -> torch.Tensor:
        """All experts' rows, one expert after the other; rows of zeros give zeros."""
        chosen = (hidden_states != 0).any(-1).nonzero().flatten()
        experts_of = (chosen // (len(hidden_states) // num_experts)).unsqueeze(1)
        out = torch.zeros_like(hidden_states)
        out[chosen] = packed(hidden_states[chosen], experts_of, torch.ones(experts_of.shape), activate)
        return out

    if isinstance(experts, Llama4TextExperts):
        return mix_all
    return mix_with_identity if isinstance(experts, LongcatFlashExperts) else mix


def _num_experts(experts: Any) -> int:
    return int(experts.num_routed_experts if isinstance(experts, LongcatFlashExperts) else experts.num_experts)
