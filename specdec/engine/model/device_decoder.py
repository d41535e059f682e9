"""Llama-like decoders on a GPU: four matrix products and Triton kernels per layer, at most eleven launches.

transformers' modules launch sixty kernels per layer, which dominate small batches. As with the CPU's fused decoder, the
self-test decides: without the logits of the model's dense forward pass this decoder is not used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.batch import Batch
from specdec.engine.checkpoints.fp8 import Fp8Weight
from specdec.engine.cuda.attention import attend
from specdec.engine.cuda.layers import add_norm, rotate_write
from specdec.engine.cuda.products import fp8_linear, ordered_linear
from specdec.engine.model.fused import rotary_tables
from specdec.engine.model.skipping import has_attention, has_mlp
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.parallel.sharded_modules import GatheredLinear, RowSplitLinear, VocabSplitEmbedding
from specdec.engine.tap import FINAL, TapCollector

Weight = tuple[torch.Tensor, torch.Tensor | None]
"""A weight and a bias."""
Product = Callable[[torch.Tensor], torch.Tensor]
"""A linear layer."""
_FP8_SIZES = 16
"""Divisor of the sizes of weights that `fp8_linear` takes."""


@dataclass(slots=True)
class _Attention:
    norm: torch.Tensor
    head_norms: torch.Tensor | None
    """[2, dim], of queries and keys."""
    qkv: Product
    output: Product
    layer: int
    """Number of its keys and values in the cache, which counts layers that attend."""


@dataclass(slots=True)
class _Mlp:
    norm: torch.Tensor
    gate_up: Product
    down: Product


class DeviceDecoder:
    """Runs a model that ``is_fusable`` accepts, in its dtype and on its device.

    No operation depends on data, so that a pass can be captured. A token id outside the model gives NaN.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: Sequence[AttentionOptions],
        max_model_len: int,
        *,
        row_invariant: bool = False,
        is_fp8: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        """Take the weights off the modules layer by layer: memory peaks one layer above the model's.

        ``row_invariant``: own matrix products, so that a row's bits do not depend on the batch; otherwise torch's,
        which are faster with many rows. ``is_fp8``: weights, which are `round_to_fp8`'s, take 8 bits. ``group``: the
        model's ranks (``shard_model``), which must be called alike; sums over them are in rank order if
        ``row_invariant``, else in the library's order.
        """
        decoder: Any = model.model
        head: Any = model.lm_head
        self._options = list(options)
        pack = _in_fp8 if is_fp8 else partial(_as_it_is, ordered_linear if row_invariant else linear)
        self._group, self._is_ordered = group, row_invariant
        self._num_heads = int(model.config.num_attention_heads) // (1 if group is None else group.size)
        self._epsilon = float(model.config.rms_norm_eps)
        self._split_embedding = decoder.embed_tokens if isinstance(decoder.embed_tokens, VocabSplitEmbedding) else None
        self._embedding = decoder.embed_tokens.weight.detach()
        self._final_norm = decoder.norm.weight.detach()
        self._split_outputs = head.out_features if isinstance(head, GatheredLinear) else None
        head = head.local if isinstance(head, GatheredLinear) else head
        self._head = pack((head.weight.detach(), head.bias))
        self._tables = rotary_tables(decoder.rotary_emb, max_model_len, self._embedding.device)
        self._layers: list[list[_Attention | _Mlp]] = []
        num_attending = 0
        for layer in decoder.layers:
            self._layers.append(_taken(layer, num_attending, group, pack))
            num_attending += has_attention(layer)
            if self._embedding.is_cuda:
                torch.cuda.empty_cache()  # of joined weights: the next layer's may not fit the hole

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """See ``StepModel``. Cost: eleven launches per layer and ten per pass; with ranks, two collectives
        per layer and two per pass.
        """
        plans: dict[str, Any] = {}
        epsilon, num_heads, tables, is_ordered = self._epsilon, self._num_heads, self._tables, self._is_ordered
        parts = [part for layer in self._layers for part in layer]
        next_norms = iter([*(part.norm for part in parts[1:]), self._final_norm])
        embedded = self._embed(batch.input_ids)
        residual, normed = torch.zeros_like(embedded), torch.empty_like(embedded)
        add_norm(embedded, parts[0].norm, residual, normed, epsilon)
        tap = TapCollector(batch.tap)
        for number, layer in enumerate(self._layers):
            tap.see(number, residual)
            for part in layer:
                if isinstance(part, _Attention):
                    qkv, index = part.qkv(normed), part.layer
                    query = rotate_write(qkv, num_heads, index, batch, cache, tables, part.head_norms, epsilon)
                    attended = attend(query, index, batch, cache, self._options[index], plans, row_invariant=is_ordered)
                    added = part.output(attended.flatten(1))
                else:
                    gate, up = part.gate_up(normed).chunk(2, dim=1)
                    added = part.down(silu(gate).mul_(up))
                add_norm(self._summed(added), next(next_norms), residual, normed, epsilon)
        tap.see(len(self._layers), residual)
        tap.see(FINAL, normed)
        tap.done()
        logits = self._head(normed.index_select(0, batch.logits_indices))
        if self._group is not None and self._split_outputs is not None:
            logits = self._group.gather_columns(logits, self._split_outputs)
        return logits.float()

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings; a token id outside the model gives NaN, with ranks zeros."""
        if self._split_embedding is not None:
            return self._split_embedding(input_ids)
        known = input_ids.clamp(0, len(self._embedding) - 1)
        return self._embedding.index_select(0, known).masked_fill_((known != input_ids).unsqueeze(1), torch.nan)

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, or its parts, which ``add_norm`` adds in order."""
        if self._group is None:
            return partial
        return self._group.gather(partial) if self._is_ordered else self._group.sum(partial)


def _as_it_is(product: Callable[..., torch.Tensor], weight: Weight) -> Product:
    return partial(product, weight=weight[0], bias=weight[1])


def _in_fp8(weight: Weight) -> Product:
    """A product with the weight in 8 bits; sizes that torch's scaled products do not take stay as they are."""
    if any(size % _FP8_SIZES for size in weight[0].shape):
        return _as_it_is(linear, weight)
    rounded = Fp8Weight.of(weight[0])
    return partial(fp8_linear, numbers=rounded.numbers, scales=rounded.scales, bias=weight[1])


def _joined(modules: Sequence[Any]) -> Weight:
    weights = [module.weight.detach() for module in modules]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = None if modules[0].bias is None else torch.cat([module.bias.detach() for module in modules])
    for module in modules:
        module.weight = None
    return weight, bias


def _summand(module: Any, group: RankGroup | None) -> Weight:
    """The weight of a layer whose outputs are summed over the ranks; rank 0 has the bias."""
    if not isinstance(module, RowSplitLinear):
        return _joined([module])
    weight, _ = _joined([module.local])
    return weight, module.bias if group is None or group.rank == 0 else None


def _taken(
    layer: Any, number: int, group: RankGroup | None, pack: Callable[[Weight], Product]
) -> list[_Attention | _Mlp]:
    """The sublayers that a layer has; `number`: of its attention."""
    parts: list[_Attention | _Mlp] = []
    if has_attention(layer):
        attention = layer.self_attn
        norms = [getattr(attention, each).weight.detach() for each in ("q_norm", "k_norm") if hasattr(attention, each)]
        parts.append(
            _Attention(
                norm=layer.input_layernorm.weight.detach(),
                head_norms=torch.stack(norms) if norms else None,
                qkv=pack(_joined([attention.q_proj, attention.k_proj, attention.v_proj])),
                output=pack(_summand(attention.o_proj, group)),
                layer=number,
            )
        )
    if has_mlp(layer):
        mlp = layer.mlp
        parts.append(
            _Mlp(
                norm=layer.post_attention_layernorm.weight.detach(),
                gate_up=pack(_joined([mlp.gate_proj, mlp.up_proj])),
                down=pack(_summand(mlp.down_proj, group)),
            )
        )
    return parts
