"""EAGLE-1 and 2 (arXiv:2401.15077): a decoder layer over the target's last hidden states and the next token.

x = fc concat(embed[token j+1], f_j)    f_j: the target's last hidden state at token j h = decoder layer(x), without a
norm before its attention logits of token j+2 = lm_head h;  after a drafted token h takes the place of f
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec.drafting.heads.checkpoint import UNUSED, HeadFiles, fill
from specdec.drafting.heads.config import HeadConfig
from specdec.drafting.heads.methods.eagle3 import standard_names
from specdec.drafting.heads.parts import Attend, Layer, Rotary
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.heads.vocabulary import DraftVocabulary, read_vocabulary
from specdec.drafting.interface import Capabilities

CAPABILITIES = Capabilities(needs_hidden_states=True, is_serial=True)


class EagleModel(nn.Module):
    """The modules, named as in the checkpoint; a `SerialModel`."""

    def __init__(
        self, config: HeadConfig, vocab_size: int, draft_size: int, num_positions: int, *, has_bias: bool
    ) -> None:
        super().__init__()
        layers = config.layers
        size = layers.hidden_size
        self.embed_tokens = nn.Embedding(vocab_size, size)
        self.fc = nn.Linear(2 * size, size, bias=has_bias)
        self.layers = nn.ModuleList(
            [
                Layer(layers, config.has_head_norms, has_input_norm=index > 0)
                for index in range(layers.num_hidden_layers)
            ]
        )
        self.lm_head = nn.Linear(size, draft_size, bias=False)
        self._rotary = Rotary(layers, num_positions)

    def _apply(self, *args: Any, **kwargs: Any) -> EagleModel:
        super()._apply(*args, **kwargs)
        self._rotary.to(next(self.parameters()).device)
        return self

    @property
    def width(self) -> int:
        """See `SerialModel`."""
        return self.lm_head.in_features

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The one tap, unchanged."""
        return states[:, 0]

    def run(
        self, states: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See `SerialModel`."""
        x: torch.Tensor = self.fc(torch.cat([self.embed_tokens(token_ids), states], dim=-1))
        for index, layer in enumerate(self.layers):
            x = layer(x, self._rotary, positions, index, attend)
        return x

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `SerialModel`."""
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `SerialModel`."""
        scores: torch.Tensor = self.lm_head(hidden)
        return scores


def load_eagle(files: HeadFiles, config: HeadConfig, target: HeadTarget) -> tuple[EagleModel, DraftVocabulary]:
    """Load the modules on the target's device, and their vocabulary. Raises HeadRefused."""
    tensors = standard_names(files.tensors)
    vocab_size, width = target.vocab_size, config.layers.hidden_size
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.lm_head(width)
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = target.embedding(width)
    draft_size = config.draft_vocab_size or tensors["lm_head.weight"].shape[0]
    vocabulary = read_vocabulary(tensors, draft_size, vocab_size)
    # Implementations differ on a default bias, so the file decides.
    model = EagleModel(config, vocab_size, draft_size, target.num_positions, has_bias="fc.bias" in tensors)
    fill(model, tensors, unused=UNUSED)
    target.place(model)
    return model, vocabulary
