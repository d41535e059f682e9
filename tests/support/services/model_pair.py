"""Folders of models, without an import of torch; `tiny_pair` makes models."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Folders of a target and its draft."""

    target: Path
    draft: Path


def with_another_tokenizer(model: Path, folder: Path) -> Path:
    """Copy a model, with two of its tokens exchanged."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    return folder
