"""Targets whose checkpoints carry a module for multi-token prediction, and what the module computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from tests.support.engine.mixtures import MIXTURES
from tests.support.engine.tiny_models import VOCAB_SIZE
from tests.support.scripted.model import make_tokenizer

_QWEN2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """A family's target, and the names of its checkpoints' module."""

    make: Callable[[], PreTrainedConfig]
    prefix: str
    names: dict[str, str]
    """Names of token_norm, hidden_norm, projection, and norm."""
    is_hidden_first: bool = False


_DEEPSEEK = {"token_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
FAMILIES = {
    "deepseek_v3": Family(MIXTURES["deepseek_v3"], "model.layers.2.", _DEEPSEEK),
    "glm4_moe": Family(MIXTURES["glm4_moe"], "model.layers.2.", _DEEPSEEK),
    "mimo": Family(
        lambda: Qwen2Config(**_QWEN2),
        "model.mtp_layers.0.",
        {
            "token_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "projection": "input_proj",
            "norm": "final_layernorm",
        },
        is_hidden_first=True,
    ),
}


class Reference(nn.Module):
    """A target and its module by their formulas, with transformers' dense attention."""

    def __init__(self, family: Family, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config: Any = family.make()
        config._attn_implementation = "eager"
        self.family = family
        self.target = AutoModelForCausalLM.from_config(config).float()
        one = copy.deepcopy(config)
        one.num_hidden_layers = 1
        if hasattr(one, "layer_types"):
            one.layer_types = one.layer_types[-1:]
        if hasattr(one, "first_k_dense_replace"):
            one.first_k_dense_replace = 0
        self.module = AutoModelForCausalLM.from_config(one).float()
        size = config.hidden_size
        self.token_norm, self.hidden_norm = (nn.Parameter(1 + 0.1 * torch.randn(size)) for _ in range(2))
        self.projection = nn.Parameter(torch.randn(size, 2 * size) * (2 * size) ** -0.5)
        self.epsilon = float(config.rms_norm_eps)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self.epsilon)

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's last hidden states [B, T, H] of tokens [B, T]."""
        states: torch.Tensor = self.target.model(tokens, use_cache=False).last_hidden_state
        return states

    def logits(self, states: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """The module's logits [B, T, V] from states [B, T, H] and the tokens after them [B, T]."""
        embedded = self.target.model.embed_tokens(next_ids)
        parts = [self._norm(embedded, self.token_norm), self._norm(states, self.hidden_norm)]
        x = torch.cat(parts[::-1] if self.family.is_hidden_first else parts, -1) @ self.projection.T
        scores: torch.Tensor = self.target.lm_head(
            self.module.model(inputs_embeds=x, use_cache=False).last_hidden_state
        )
        return scores

    def save(self, directory: Path) -> Path:
        """Write both as one checkpoint; returns the directory."""
        self.module.save_pretrained(directory)
        layer = load_file(directory / "model.safetensors")
        self.target.save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        prefix, names = self.family.prefix, self.family.names
        own = {name.replace("model.layers.0.", prefix): value for name, value in layer.items() if ".layers.0." in name}
        own[f"{prefix}{names['norm']}.weight"] = layer["model.norm.weight"]
        for name in ("token_norm", "hidden_norm", "projection"):
            own[f"{prefix}{names[name]}.weight"] = getattr(self, name).detach().clone()
        save_file({**tensors, **own}, directory / "model.safetensors", metadata={"format": "pt"})
        make_tokenizer().save(str(directory / "tokenizer.json"))
        return directory


def train(reference: Reference, rows: Sequence[Sequence[int]], num_steps: int) -> None:
    """Train a target and its module together on rows of tokens of one length."""
    tokens = torch.tensor(rows)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=4e-3)
    for _ in range(num_steps):
        states = reference.states(tokens)
        first = functional.cross_entropy(
            reference.target.lm_head(states[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        ahead = reference.logits(states[:, :-2], tokens[:, 1:-1])
        second = functional.cross_entropy(ahead.flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        (first + second).backward()
        optimizer.step()
    reference.eval().requires_grad_(False)
