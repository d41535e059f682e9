"""Models as folders. Free of torch, which makes them: see `tiny_pair`."""

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
    """A copy of a model of which two tokens have changed places."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    return folder
