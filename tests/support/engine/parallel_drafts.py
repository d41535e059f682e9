"""Drafts with a mask token, made from the shipped draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specdec.commands.shipped_pair import shipped_pair

MASK_TOKEN = 4096
"""Id of the mask token, the first one without a name in the tokenizer."""


def draft_with_a_mask(folder: Path, key: str = "pard_token") -> Path:
    """Write the shipped draft with one more row in its embedding, for the untrained mask token."""
    pair = shipped_pair()
    assert pair is not None
    shutil.copytree(pair / "draft", folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    row = weights[name].float().mean(dim=0, keepdim=True) + 0.05 * torch.randn(
        1, weights[name].shape[1], generator=torch.Generator().manual_seed(2)
    )
    weights[name] = torch.cat([weights[name], row.to(weights[name].dtype)]).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": MASK_TOKEN + 1, key: MASK_TOKEN}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
