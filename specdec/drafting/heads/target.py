"""The target as heads see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from specdec.drafting.heads.cache import HeadCache
from specdec.drafting.heads.checkpoint import HeadRefused, read_tensors
from specdec.drafting.heads.passes import HeadPasses
from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.latent import pack_latents
from specdec.engine.attention.paged import AttentionKernel
from specdec.engine.attention.torch_kernels import GatherAttention
from specdec.engine.checkpoints.files import find_model_files
from specdec.engine.engine import Engine
from specdec.engine.model.device_choice import device_attention, is_on_gpu
from specdec.engine.model.mixtures.blocks import make_model_row_invariant
from specdec.engine.model.mixtures.weights import native_experts
from specdec.engine.model.runner import ModelRunner
from specdec.engine.native.kernels import NativeAttention
from specdec.engine.native.latent import NativeHeads
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.tree import MAX_TREE_NODES

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "embed_tokens.weight",
    "model.language_model.embed_tokens.weight",  # the last three: of vision-language models
    "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(slots=True)
class HeadTarget:
    """A loaded target: its sizes, its engine, its sampler, and the weights that heads share with it."""

    runner: ModelRunner
    engine: Engine
    sampler: Sampler
    _weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding and columns of its logits."""
        return self.runner.num_logits

    @property
    def num_positions(self) -> int:
        """Positions of the rotary tables: the context, and drafted tokens past its end."""
        return self.runner.max_model_len + 2 * MAX_TREE_NODES

    def place(self, module: nn.Module) -> None:
        """Move a head to the target's device and dtype; on a CPU with native kernels it uses them."""
        module.to(self.runner.device, self.runner.dtype)
        module.eval().requires_grad_(False)
        kernels = self.runner.kernels
        if kernels is not None:
            pack_latents(module, partial(NativeHeads, kernels))
            make_model_row_invariant(module, kernels.pack, partial(native_experts, kernels))

    def attention(self, geometries: Sequence[LayerGeometry]) -> AttentionKernel:
        """The fastest available kernel for a head's layers."""
        if is_on_gpu(self.runner.device):
            return device_attention(geometries, has_kernels=self.runner.has_device_kernels)
        if self.runner.kernels is not None:
            return NativeAttention(self.runner.kernels)
        return GatherAttention()

    def passes(self, cache: HeadCache) -> HeadPasses:
        """The head's passes over its cache; replayed if the target's steps are."""
        return HeadPasses(cache, self.runner.replays, self.runner.dtype, self.runner.max_model_len)

    def embedding(self, width: int) -> torch.Tensor:
        """The target's embedding [V, width], from its files. Raises HeadRefused if it is missing or of another
        width.
        """
        return self._checked("embedding", _EMBEDDINGS, width)

    def lm_head(self, width: int) -> torch.Tensor:
        """The weight [V, width] of the target's logits, or its embedding if tied. Raises HeadRefused."""
        return self._checked("lm_head", (*_HEADS, *_EMBEDDINGS), width)

    def _checked(self, what: str, names: Sequence[str], width: int) -> torch.Tensor:
        weight = self._weights.get(what)
        if weight is None:
            weight = self._weights[what] = self._read(what, names)
        if weight.shape[1] != width:
            raise HeadRefused(f"the target's {what} has a width of {weight.shape[1]}, the head needs {width}")
        return weight

    def _read(self, what: str, names: Sequence[str]) -> torch.Tensor:
        settings = self.runner.settings
        if settings.load_format == "dummy":
            raise HeadRefused(f"the target's {what} is not in its files: load_format is dummy")
        directory, _ = find_model_files(settings.model, settings.revision)
        found: dict[str, torch.Tensor] = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            found |= read_tensors(file, names)
        for name in names:
            if name in found:
                return found[name]
        raise HeadRefused(f"the target's files have none of {', '.join(names)}, which the head shares")
