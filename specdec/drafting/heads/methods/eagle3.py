"""EAGLE-3 and 3.1 (arXiv:2503.01840): a decoder layer over fused hidden states of three layers and the next token.

For token j with the target's hidden states taps_j, and token j+1:

    g = fc concat(taps_j)                   its config may norm each tap (3.1), or all together a = rms(g; hidden_norm)
    h = residual + attention over (rms(embed[token j+1]; input_layernorm), a), then an MLP    residual: a, or g logits
    of token j+2 = lm_head rms(h; norm);  after a drafted token h (3.1: normed) takes the place of g
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from specdec.drafting.heads.checkpoint import UNUSED, HeadFiles, fill, renamed
from specdec.drafting.heads.config import HeadConfig
from specdec.drafting.heads.parts import Attend, Attention, Layer, Mlp, RmsNorm, Rotary
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary, read_vocabulary
from specdec.drafting.interface import Capabilities

CAPABILITIES = Capabilities(needs_hidden_states=True, is_serial=True)
FIRST_DEPTH = 5
"""Depth of trees if neither the operator nor the head sets it."""
_OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


class FirstLayer(nn.Module):
    """The first layer, which reads embeddings and hidden states."""

    def __init__(self, config: HeadConfig, norm_before_residual: bool) -> None:
        super().__init__()
        layers = config.layers
        size, epsilon = layers.hidden_size, layers.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RmsNorm(size, epsilon)
        self.input_layernorm = RmsNorm(size, epsilon)
        self.post_attention_layernorm = RmsNorm(size, epsilon)
        self.self_attn = Attention(layers, 2 * size, config.has_head_norms)
        self.mlp = Mlp(layers)

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, rotary: Rotary, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Embeddings and states, both [T, H], to [T, H]."""
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        x = residual + self.self_attn(both, rotary, positions, 0, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Model(nn.Module):
    """The modules, named as in the checkpoint; a `SerialModel`."""

    def __init__(
        self,
        config: HeadConfig,
        num_taps: int,
        target_size: int,
        vocab_size: int,
        draft_size: int,
        num_positions: int,
        *,
        has_fc_norm: bool = False,
    ) -> None:
        """`target_size`: the target's hidden size; `vocab_size` and `draft_size`: the target's and the head's
        vocabulary.
        """
        super().__init__()
        layers = config.layers
        size, epsilon = layers.hidden_size, layers.rms_norm_eps
        before = config.flag("norm_before_residual", default=config.is_speculators and config.method == "eagle3")
        self.embed_tokens = nn.Embedding(vocab_size, size)
        self.fc = nn.Linear(num_taps * target_size, size, bias=False)
        first: list[nn.Module] = [FirstLayer(config, before)]
        rest = [Layer(layers, config.has_head_norms) for _ in range(layers.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([*first, *rest])
        self.norm = RmsNorm(size, epsilon)
        self.lm_head = nn.Linear(size, draft_size, bias=False)
        is_normed = config.flag("norm_before_fc", default=False)
        self.input_norm = RmsNorm(num_taps * target_size, epsilon) if is_normed else None
        norms = [RmsNorm(target_size, epsilon) for _ in range(num_taps)]
        self.fc_norm = nn.ModuleList(norms) if has_fc_norm else None
        self._norms_output = config.flag("norm_output", default=False)
        self._rotary = Rotary(layers, num_positions)

    def _apply(self, *args: Any, **kwargs: Any) -> Eagle3Model:
        super()._apply(*args, **kwargs)
        self._rotary.to(self.norm.weight.device)
        return self

    @property
    def width(self) -> int:
        """See `SerialModel`."""
        return self.lm_head.in_features

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See `SerialModel`."""
        if self.fc_norm is not None:
            states = torch.stack([norm(states[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        flat = states.flatten(1)
        fused: torch.Tensor = self.fc(flat if self.input_norm is None else self.input_norm(flat))
        return fused

    def run(
        self, states: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See `SerialModel`."""
        first, *rest = self.layers
        x: torch.Tensor = first(self.embed_tokens(token_ids), states, self._rotary, positions, attend)
        for index, layer in enumerate(rest, 1):
            x = layer(x, self._rotary, positions, index, attend)
        return x

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `SerialModel`."""
        return self.norm(hidden) if self._norms_output else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `SerialModel`."""
        scores: torch.Tensor = self.lm_head(self.norm(hidden))
        return scores


def standard_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of older files under their present names."""

    def rename(name: str) -> str:
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        stem, _, rest = name.partition(".")
        return f"{_OLD_NORMS[stem]}.{rest}" if stem in _OLD_NORMS else name

    return renamed(tensors, rename)


def load_eagle3(
    files: HeadFiles, config: HeadConfig, layer_ids: tuple[int, ...], target: HeadTarget
) -> tuple[Eagle3Model, DraftVocabulary]:
    """Load the modules on the target's device, and their vocabulary. Raises HeadRefused."""
    tensors = standard_names(files.tensors)
    vocab_size, width = target.vocab_size, config.layers.hidden_size
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.lm_head(width)
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = target.embedding(width)
    draft_size = config.draft_vocab_size or tensors["lm_head.weight"].shape[0]
    vocabulary = read_vocabulary(tensors, draft_size, vocab_size)
    model = Eagle3Model(
        config,
        len(layer_ids),
        target.runner.hidden_size,
        vocab_size,
        draft_size,
        target.num_positions,
        has_fc_norm="fc_norm.0.weight" in tensors,
    )
    fill(model, tensors, unused=UNUSED)
    target.place(model)
    return model, vocabulary
