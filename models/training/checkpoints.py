"""Saving a model so that a reader never sees half of it, and loading it back."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .architectures import build, generation_config


def plain_copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return an uncompiled bfloat16 copy with transformers' own attention."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    twin = LlamaForCausalLM(config)
    twin.load_state_dict(model.state_dict())
    return twin.bfloat16().eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer into ``folder``, each file replaced in one step."""
    twin = plain_copy(model)
    twin.generation_config = generation_config()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        twin.save_pretrained(scratch)
        save_tokenizer(tokenizer, Path(scratch))
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer under the class name that every transformers release since 4 knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for transient in ("backend", "is_local", "local_files_only"):
        config.pop(transient, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def load_for_training(folder: Path, seed: int) -> LlamaForCausalLM:
    """Return a saved model as float32, its layers compiled for training."""
    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = build(saved.config, seed)
    model.load_state_dict(saved.state_dict())
    return model
