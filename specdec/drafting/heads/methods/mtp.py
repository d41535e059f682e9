"""Multi-token prediction: the modules that checkpoints carry beside their layers (DeepSeek-V3, arXiv:2412.19437).

For token j with the target's last hidden state f_j, and token j+1:

    x = projection concat(norm(embed[token j+1]), norm(f_j))        MiMo: in the other order
    h = a decoder layer of the target's class (x)
    logits of token j+2 = lm_head norm(h);  after a drafted token h takes the place of f (MiMo, Qwen3-Next: normed)

The layer is transformers' own, as a model of one layer, with paged attention. Of several modules the first is used, for
every depth.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from specdec.drafting.heads.checkpoint import HeadRefused
from specdec.drafting.heads.parts import Attend
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.interface import Capabilities
from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.latent import cache_latents
from specdec.engine.attention.paged import (
    ATTENTION_NAME,
    CONTEXT_KWARG,
    AttentionKernel,
    AttentionOptions,
    ForwardContext,
    RecordingKernel,
    register_paged_attention,
)
from specdec.engine.batch import Batch
from specdec.engine.checkpoints.files import find_model_files
from specdec.engine.errors import ModelNotSupported
from specdec.engine.model.model_check import switch_attention
from specdec.engine.model.tapping import find_decoder

CAPABILITIES = Capabilities(needs_hidden_states=True, is_serial=True)
FIRST_DEPTH = 3
"""Depth of trees if the operator does not set it: modules are trained for one or a few tokens ahead."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a family's checkpoints have the first module, and what they call its parts."""

    prefix: str
    """Regular expression of the names' beginning; {layers}: the target's number of layers."""
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""
    """The decoder layer's names begin with it."""
    is_hidden_first: bool = False
    """Whether the projection reads the hidden state before the embedding."""
    carries_normed: bool = False
    """Whether the normed state takes the place of the target's."""


LAYOUTS = (
    # DeepSeek V3, GLM 4.5 and later
    Layout(r"model\.layers\.{layers}\.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    Layout(
        r"model\.mtp_layers\.0\.",  # MiMo
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        is_hidden_first=True,
        carries_normed=True,
    ),
    Layout(
        r"mtp\.",  # Qwen3-Next
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "fc",
        "norm",
        layer="layers.0.",
        carries_normed=True,
    ),
)
_OWN = {"shared_head.head.weight": "lm_head.weight", "embed_tokens.weight": "model.embed_tokens.weight"}
"""Names of weights that a module may have of its own."""


class MtpModel(nn.Module):
    """A `SerialModel` around a causal model of one layer, whose final norm is applied here."""

    def __init__(self, trunk: Any, layout: Layout) -> None:
        super().__init__()
        found = find_decoder(trunk)
        if found is None or not isinstance(getattr(found[0], "norm", None), nn.Module):
            raise HeadRefused(f"{type(trunk).__name__} has no layers and norm that a module could take")
        decoder: Any = found[0]
        size = int(decoder.norm.weight.shape[0])
        self.trunk = trunk
        self.norm = decoder.norm
        decoder.norm = nn.Identity()
        self.token_norm, self.hidden_norm = copy.deepcopy(self.norm), copy.deepcopy(self.norm)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.width = size
        """See `SerialModel`."""
        self._layout = layout

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The one tap, unchanged."""
        return states[:, 0]

    def run(
        self, states: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See `SerialModel`."""

        def kernel(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            layer: int,
            context: ForwardContext,
            options: AttentionOptions,
        ) -> torch.Tensor:
            return attend(layer, query, key, value)

        hidden = self.run_with(kernel, states, token_ids, positions)
        return self._normed(hidden) if self._layout.carries_normed else hidden

    def run_with(
        self, kernel: AttentionKernel, states: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states before the final norm, with attention by a kernel."""
        trunk: Any = self.trunk
        embedded = trunk.get_input_embeddings()(token_ids)
        parts = [self.token_norm(embedded), self.hidden_norm(states)]
        x = self.projection(torch.cat(parts[::-1] if self._layout.is_hidden_first else parts, dim=-1))
        context = ForwardContext(_batch_of(token_ids, positions), None, kernel)
        out = trunk.base_model(
            inputs_embeds=x[None], position_ids=positions[None], use_cache=False, **{CONTEXT_KWARG: context}
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `SerialModel`."""
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `SerialModel`."""
        trunk: Any = self.trunk
        normed = hidden if self._layout.carries_normed else self._normed(hidden)
        scores: torch.Tensor = trunk.get_output_embeddings()(normed)
        return scores

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        norm: Any = self.norm
        result: torch.Tensor = norm(hidden)
        return result


def load_mtp(folder: str, target: HeadTarget) -> tuple[MtpModel, list[LayerGeometry], AttentionOptions]:
    """Load the module of a folder, or of the target's own if it is "".

    Returns it on the target's device, with the geometry and options of its attention. Raises HeadRefused.
    """
    settings = target.runner.settings
    directory = Path(folder).expanduser() if folder else find_model_files(settings.model, settings.revision)[0]
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=settings.trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise HeadRefused(f"{directory}: has no usable config: {error}") from error
    config = config.get_text_config(decoder=True)
    layout, tensors = _read_module(directory, config)
    parts = {name: f"{part}.weight" for name, part in _parts(layout).items()}
    if missing := [part for part in parts.values() if part not in tensors]:
        raise HeadRefused(f"{directory}: tensors missing: {', '.join(missing)}")
    own = {name: tensors.pop(part) for name, part in parts.items()}
    width = int(config.hidden_size)
    tensors.setdefault("model.embed_tokens.weight", target.embedding(width))
    tensors.setdefault("lm_head.weight", target.lm_head(width))
    tensors["model.norm.weight"] = own.pop("norm")
    model = MtpModel(_trunk(directory, config, tensors, target), layout)
    for name, value in own.items():
        weight = getattr(model, name).weight
        if value.shape != weight.shape or not bool(torch.isfinite(value.float()).all()):
            raise HeadRefused(f"{directory}: {parts[name]} is {tuple(value.shape)}, or has no numbers")
        with torch.no_grad():
            weight.copy_(value)
    if model.logits(torch.zeros(1, width)).shape[1] != target.vocab_size:
        raise HeadRefused(f"{directory}: the module's vocabulary is not the target's {target.vocab_size} tokens")
    geometries, options = _record_attention(model, config)
    target.place(model)
    return model, geometries, options


def _parts(layout: Layout) -> dict[str, str]:
    return {
        "token_norm": layout.token_norm,
        "hidden_norm": layout.hidden_norm,
        "projection": layout.projection,
        "norm": layout.norm,
    }


def _read_module(directory: Path, config: PreTrainedConfig) -> tuple[Layout, dict[str, torch.Tensor]]:
    """The layout of a folder's module and its tensors: those of the decoder layer as of layer 0, the others by their
    own names. Raises HeadRefused.
    """
    names = dict(_named_tensors(directory))
    for layout in LAYOUTS:
        prefix = re.compile(layout.prefix.format(layers=config.num_hidden_layers))
        rests = {name: name[match.end() :] for name in names if (match := prefix.match(name))}
        if f"{layout.projection}.weight" in rests.values():
            break
    else:
        raise HeadRefused(f"{directory}: its files have no module for multi-token prediction")
    others = {f"{part}.weight" for part in _parts(layout).values()}
    tensors: dict[str, torch.Tensor] = {}
    for name, rest in rests.items():
        if rest in others or rest in _OWN:
            tensors[_OWN.get(rest, rest)] = names[name].read(name)
        elif rest.startswith(layout.layer):
            tensors[f"model.layers.0.{rest.removeprefix(layout.layer)}"] = names[name].read(name)
    return layout, tensors


@dataclass(frozen=True, slots=True)
class _File:
    path: Path

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.path, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def _named_tensors(directory: Path) -> Iterator[tuple[str, _File]]:
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, _File(path)
        except (OSError, SafetensorError) as error:
            raise HeadRefused(f"{path}: {error}") from error


def _trunk(directory: Path, config: PreTrainedConfig, tensors: dict[str, torch.Tensor], target: HeadTarget) -> Any:
    """A causal model of one layer with these weights. transformers joins experts' weights, as it does at load."""
    is_sparse = any(".experts." in name for name in tensors)
    one: Any = copy.deepcopy(config)
    one.num_hidden_layers = 1
    for name, value in {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if is_sparse else "dense"],
        "first_k_dense_replace": 0 if is_sparse else 1,
        "tie_word_embeddings": False,
    }.items():
        if getattr(one, name, None) is not None:
            setattr(one, name, value)
    trust = target.runner.settings.trust_remote_code
    try:
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(one, trust_remote_code=trust))
        trunk, report = kind.from_pretrained(
            None,
            config=one,
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        register_paged_attention()
        switch_attention(trunk, ATTENTION_NAME)
    except (ValueError, OSError, KeyError, RuntimeError, ModelNotSupported) as error:
        raise HeadRefused(f"{directory}: its module cannot be loaded: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report[what])):
            raise HeadRefused(f"{directory}: {what.replace('_', ' ')} of its module: {', '.join(names[:8])}")
    if target.runner.device.type == "cpu":
        cache_latents(trunk)
    return trunk.eval()


def _record_attention(model: MtpModel, config: PreTrainedConfig) -> tuple[list[LayerGeometry], AttentionOptions]:
    recorder = RecordingKernel()
    numbers = torch.arange(2)
    try:
        with torch.inference_mode():
            model.run_with(recorder, torch.zeros(2, model.width), numbers, numbers)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise HeadRefused(f"the module of {config.model_type} cannot be run: {error}") from error
    if len(recorder.options) != 1:
        raise HeadRefused(f"the module of {config.model_type} attends {len(recorder.options)} times, not once")
    return recorder.geometries, recorder.options[0]


def _batch_of(token_ids: torch.Tensor, positions: torch.Tensor) -> Batch:
    """The rows without their places in a cache, which the head's attention has."""
    none = token_ids.new_zeros(0)
    return Batch(
        input_ids=token_ids,
        position_ids=positions,
        slot_mapping=none,
        row_seq=none,
        context_lens=none,
        path_offsets=none,
        path_slots=none,
        block_tables=none,
        logits_indices=none,
        num_seqs=0,
    )
