"""Heads of random weights in their authors' file formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Sizes:
    """Sizes of the target and of its head."""

    vocab: int
    target: int
    width: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    draft: int = 0
    """Tokens of the head's vocabulary; 0: the target's."""
    rank: int = 8

    @property
    def drafted(self) -> int:
        return self.draft or self.vocab


class Tensors(dict[str, torch.Tensor]):
    """Random tensors by name."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, name: str, *shape: int) -> None:
        self[name] = torch.randn(*shape, generator=self.generator) * shape[-1] ** -0.5

    def norm(self, name: str, size: int) -> None:
        self[name] = 1 + 0.1 * torch.randn(size, generator=self.generator)

    def layer(
        self,
        prefix: str,
        sizes: Sizes,
        in_size: int,
        *,
        norms: bool = False,
        input_norm: bool = True,
        bias: bool = False,
    ) -> None:
        width, kv_width = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
        shapes = {"q_proj": (width, in_size), "k_proj": (kv_width, in_size), "v_proj": (kv_width, in_size)}
        for name, shape in {**shapes, "o_proj": (sizes.width, width)}.items():
            self.matrix(f"{prefix}self_attn.{name}.weight", *shape)
            if bias:
                self.matrix(f"{prefix}self_attn.{name}.bias", shape[0])
        if norms:
            self.norm(f"{prefix}self_attn.q_norm.weight", sizes.dim)
            self.norm(f"{prefix}self_attn.k_norm.weight", sizes.dim)
        if input_norm:
            self.norm(f"{prefix}input_layernorm.weight", sizes.width)
        self.norm(f"{prefix}post_attention_layernorm.weight", sizes.width)
        self.matrix(f"{prefix}mlp.gate_proj.weight", sizes.inner, sizes.width)
        self.matrix(f"{prefix}mlp.up_proj.weight", sizes.inner, sizes.width)
        self.matrix(f"{prefix}mlp.down_proj.weight", sizes.width, sizes.inner)

    def vocabulary(self, sizes: Sizes) -> None:
        if sizes.draft:
            ids = torch.randperm(sizes.vocab, generator=self.generator)[: sizes.draft].sort().values
            self["d2t"] = ids - torch.arange(sizes.draft)
            self["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool)
            self["t2d"][ids] = True

    def ends(self, sizes: Sizes) -> None:
        self.matrix("embed_tokens.weight", sizes.vocab, sizes.width)
        self.matrix("lm_head.weight", sizes.drafted, sizes.width)
        self.vocabulary(sizes)


def layer_config(sizes: Sizes, model_type: str = "llama", num_layers: int = 1) -> dict[str, Any]:
    """A decoder's config in the form of config.json."""
    return {
        "model_type": model_type,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.dim,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": 1e-5,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    }


def eagle3(sizes: Sizes, seed: int = 1, **config: Any) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3 in the format of `speculators`."""
    tensors = Tensors(seed)
    num_layers = config.pop("num_layers", 1)
    values = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_config(sizes, num_layers=num_layers),
        "draft_vocab_size": sizes.drafted,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        **config,
    }
    num_taps = len(values["eagle_aux_hidden_state_layer_ids"])
    tensors.matrix("fc.weight", sizes.width, num_taps * sizes.target)
    tensors.layer("layers.0.", sizes, 2 * sizes.width)
    tensors.norm("layers.0.hidden_norm.weight", sizes.width)
    for index in range(1, num_layers):
        tensors.layer(f"layers.{index}.", sizes, sizes.width)
    tensors.norm("norm.weight", sizes.width)
    if values.get("norm_before_fc"):
        tensors.norm("input_norm.weight", num_taps * sizes.target)
    if values.get("fc_norm"):
        for index in range(num_taps):
            tensors.norm(f"fc_norm.{index}.weight", sizes.target)
    tensors.ends(sizes)
    return values, tensors


def specforge(sizes: Sizes, seed: int = 1) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3 in the format of SpecForge and SGLang, with the tensor names of older files."""
    _, tensors = eagle3(sizes, seed)
    flat = {
        **layer_config(sizes),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": sizes.drafted,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    renamed = Tensors(seed)
    renamed.update({name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()})
    return flat, renamed


def peagle(sizes: Sizes, seed: int = 1, **config: Any) -> tuple[dict[str, Any], Tensors]:
    """P-EAGLE in the format of `speculators`."""
    values, tensors = eagle3(sizes, seed, **config)
    values |= {"speculators_model_type": "peagle", "mask_token_id": 3}
    tensors.matrix("mask_hidden", 1, 1, 3 * sizes.target)
    return values, tensors


def eagle(sizes: Sizes, seed: int = 1) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-1, as wide as its target."""
    tensors = Tensors(seed)
    tensors.matrix("embed_tokens.weight", sizes.vocab, sizes.width)
    tensors.matrix("fc.weight", sizes.width, 2 * sizes.width)
    tensors["fc.bias"] = 0.1 * torch.randn(sizes.width, generator=tensors.generator)
    tensors.layer("layers.0.", sizes, sizes.width, input_norm=False)
    tensors.matrix("lm_head.weight", sizes.vocab, sizes.width)
    return {**layer_config(sizes), "architectures": ["LlamaForCausalLMEagle"]}, tensors


def mtp(sizes: Sizes, seed: int = 1, num_layers: int = 7) -> tuple[dict[str, Any], Tensors]:
    """A module for multi-token prediction in DeepSeek's format, behind the layers of a Llama as wide as it is."""
    tensors = Tensors(seed)
    prefix = f"model.layers.{num_layers}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors.norm(f"{prefix}{name}.weight", sizes.width)
    tensors.matrix(f"{prefix}eh_proj.weight", sizes.width, 2 * sizes.width)
    tensors.layer(prefix, sizes, sizes.width)
    return layer_config(sizes, num_layers=num_layers), tensors


def dflash(sizes: Sizes, seed: int = 1, **config: Any) -> tuple[dict[str, Any], Tensors]:
    """DFlash in the format of `speculators`."""
    tensors = Tensors(seed)
    values = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer_config(sizes, "qwen3", 2),
        "draft_vocab_size": sizes.drafted,
        "block_size": 5,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [1, 3],
        **config,
    }
    tensors.matrix("fc.weight", sizes.width, len(values["aux_hidden_state_layer_ids"]) * sizes.target)
    tensors.norm("hidden_norm.weight", sizes.width)
    tensors.norm("norm.weight", sizes.width)
    for index in range(2):
        tensors.layer(f"layers.{index}.", sizes, sizes.width, norms=True)
    tensors.ends(sizes)
    return values, tensors


def dspark(sizes: Sizes, seed: int = 1, kind: str = "vanilla", **config: Any) -> tuple[dict[str, Any], Tensors]:
    """DSpark in the format of `speculators`."""
    values, tensors = dflash(sizes, seed, **config)
    values |= {"speculators_model_type": "dspark", "markov_rank": sizes.rank, "markov_head_type": kind}
    values |= {"sample_from_anchor": True, "enable_confidence_head": True, "confidence_head_with_markov": True}
    tensors.matrix("markov_head.markov_w1.weight", sizes.vocab, sizes.rank)
    tensors.matrix("markov_head.markov_w2.weight", sizes.drafted, sizes.rank)
    wide = sizes.width + sizes.rank
    if kind == "gated":
        tensors.matrix("markov_head.gate_proj.weight", sizes.rank, wide)
        tensors.matrix("markov_head.gate_proj.bias", sizes.rank)
    if kind == "rnn":
        tensors.matrix("markov_head.joint_proj.weight", 3 * sizes.rank, sizes.rank + wide)
        tensors.matrix("markov_head.joint_proj.bias", 3 * sizes.rank)
    tensors.matrix("confidence_head.proj.weight", 1, wide)
    tensors.matrix("confidence_head.proj.bias", 1)
    return values, tensors


def medusa(sizes: Sizes, seed: int = 1, num_heads: int = 3, num_layers: int = 1) -> tuple[dict[str, Any], Tensors]:
    """Medusa in the authors' format, whose config may have another number of heads."""
    tensors = Tensors(seed)
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors.matrix(f"{head}.{layer}.linear.weight", sizes.target, sizes.target)
            tensors.matrix(f"{head}.{layer}.linear.bias", sizes.target)
        tensors.matrix(f"{head}.{num_layers}.weight", sizes.vocab, sizes.target)
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "target"}, tensors


def old_medusa(sizes: Sizes, seed: int = 1, num_heads: int = 3) -> tuple[dict[str, Any], Tensors]:
    """Medusa in vLLM's former format, with a smaller vocabulary if `sizes.draft` is set."""
    _, tensors = medusa(sizes, seed, num_heads)
    renamed = Tensors(seed)
    token_map = torch.randperm(sizes.vocab, generator=tensors.generator)[: sizes.draft or sizes.vocab]
    for head in range(num_heads):
        renamed[f"medusa_heads.blocks.{head}.layers.0.weight"] = tensors[f"{head}.0.linear.weight"]
        renamed[f"medusa_heads.blocks.{head}.layers.0.bias"] = tensors[f"{head}.0.linear.bias"]
        renamed[f"medusa_heads.lm_heads.{head}.weight"] = tensors[f"{head}.1.weight"][: len(token_map)]
    renamed["token_map"] = token_map
    config = {
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": 1,
        "truncated_vocab_size": len(token_map),
    }
    return config, renamed


def save(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "") -> Path:
    """Write a checkpoint folder, as safetensors or as a pickled file `name`; returns the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if name:
        torch.save(dict(tensors), directory / name)
    else:
        save_file({key: value.contiguous() for key, value in tensors.items()}, directory / "model.safetensors")
    return directory
