"""Estimates the device memory of heads from their files' sizes and configs, without reading tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specdec.config.drafter_options import DrafterOptions, HeadOptions, MedusaOptions, MtpOptions
from specdec.drafting.heads.checkpoint import PICKLED, HeadRefused
from specdec.drafting.heads.config import read_config
from specdec.drafting.heads.parts import head_sizes
from specdec.engine.model.kv_budget import Beside

_SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Weights that a head may copy from its target."""


def footprint(drafters: Iterable[DrafterOptions]) -> Beside | None:
    """Memory that the heads among these drafters take; None: there are no heads.

    Unreadable files count as zero: loading reports their errors. So does `mtp`, whose files are mostly the target's.
    """
    each = [_of(options) for options in drafters if isinstance(options, HeadOptions)]
    return (
        None
        if not each
        else Beside(
            sum(one.num_bytes for one in each),
            sum(one.num_embeddings for one in each),
            sum(one.elements_per_token for one in each),
        )
    )


def _of(options: HeadOptions) -> Beside:
    if isinstance(options, MtpOptions):
        return Beside()
    folder = Path(options.model).expanduser()
    try:
        files = sorted(folder.glob("*.safetensors")) or [folder / name for name in PICKLED if (folder / name).is_file()]
        num_bytes = sum(file.stat().st_size for file in files)
        if isinstance(options, MedusaOptions):
            return Beside(num_bytes)
        layers = read_config(json.loads((folder / "config.json").read_text(encoding="utf-8"))).layers
        names = {name.removeprefix("model.") for file in files for name in _names(file)}
    except (OSError, ValueError, AttributeError, SafetensorError, HeadRefused):
        return Beside()
    _, num_kv_heads, head_dim = head_sizes(layers)
    num_shared = sum(name not in names for name in _SHARED)
    return Beside(num_bytes, num_shared, 2 * layers.num_hidden_layers * num_kv_heads * head_dim)


def _names(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return []
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
