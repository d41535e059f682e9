"""Common parts of heads' checkpoints in the format of `speculators`."""

from __future__ import annotations

from typing import Any

import torch

from specdec.commands.train.recipe import Recipe
from specdec.commands.train.trainee import TargetParts


def head_config(
    recipe: Recipe, target: TargetParts, *, method: str, model_type: str, num_layers: int, draft_size: int
) -> dict[str, Any]:
    """The common parts of a head's config.json: its layers, which have the target's width, and its use.

    `model_type` is that of its layers (`qwen3` normalises queries and keys per head), `draft_size` the number of
    tokens that it can propose.
    """
    size = target.hidden_size
    return {
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft_size,
        "target_hidden_size": size,
        "transformer_layer_config": {
            "model_type": model_type,
            "hidden_size": size,
            "intermediate_size": recipe.intermediate_size or size,
            "num_attention_heads": recipe.num_heads,
            "num_key_value_heads": 1,
            "head_dim": max(16, size // 6 // 16 * 16),
            "num_hidden_layers": num_layers,
            "rms_norm_eps": target.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.num_positions,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": target.rope_theta,
        },
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": recipe.num_depths,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
    }


def vocabulary_tensors(target_ids: torch.Tensor | None, vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of a head that proposes these of the target's ids [D]; empty if it proposes all."""
    if target_ids is None:
        return {}
    ids = target_ids.cpu()
    named = torch.zeros(vocab_size, dtype=torch.bool)
    named[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": named}
