"""A head and a small draft for SmolLM2-135M-Instruct, made by `specdec train` from the model's own answers.

    python -m bench.chat_drafters eagle3 draft_model    # prints their folders; about 45 minutes of one core for both

Nothing is committed but this recipe: prompts come from `bench/chats.py`, the model from a Python package, and what is
made lies in the bench's cache, where `--pair smollm2` finds it. A run that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import load_file, save_file

from bench.chats import chats, templated
from bench.checkpoints import cache_folder
from bench.packaged import PACKAGED, packaged_model

TARGET = "smollm2-135m-instruct"
NUM_PROMPTS, NUM_HELD_OUT = 480, 32
_LAYERS = (0, 29)
"""Layers of the target with which the draft begins."""
_TEXTS = ("--max-tokens", "96", "--temperature", "0.7,0", "--seed", "1", "--threads", "1")
RECIPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eagle3": (
            *_TEXTS, "--draft-vocab-size", "8192", "--intermediate-size", "1024", "--depth", "3", "--batch", "6",
            "--steps", "200", "--learning-rate", "2e-3", "--reduced-precision",
        ),
        "draft_model": (*_TEXTS, "--depth", "3", "--batch", "6", "--steps", "200", "--learning-rate", "5e-4",
                        "--reduced-precision"),
    }
)  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def drafter_folder(kind: str, cache: Path | None = None) -> Path:
    """Folder of a drafter, made or not; another recipe has another one."""
    recipe = json.dumps([PACKAGED[TARGET].sha256, NUM_PROMPTS, NUM_HELD_OUT, _LAYERS, RECIPES[kind]])
    digest = hashlib.blake2b(recipe.encode(), digest_size=6).hexdigest()
    return (cache or cache_folder()) / f"smollm2-{kind.replace('_', '-')}-{digest}"


def made_drafter(kind: str, cache: Path | None = None) -> Path | None:
    """Folder of a drafter that has been made; None: `make smollm2-drafters` makes it."""
    folder = drafter_folder(kind, cache)
    return folder if (folder / "training_report.json").is_file() else None


def make_drafter(kind: str, cache: Path | None = None) -> Path:
    """Make a drafter, unless the cache has it. Raises PackageUnusable, and CalledProcessError where training fails."""
    folder = drafter_folder(kind, cache)
    if made_drafter(kind, cache) is not None:
        return folder
    target = packaged_model(TARGET, cache)
    work = folder.with_name(f"smollm2-work-{NUM_PROMPTS}-{NUM_HELD_OUT}")  # all learn from the same answers
    work.mkdir(parents=True, exist_ok=True)
    _write_prompts(target, work / "prompts.jsonl", NUM_PROMPTS, held_out=False)
    _write_prompts(target, work / "held-out.jsonl", NUM_HELD_OUT, held_out=True)
    more: tuple[str, ...] = ()
    if kind == "draft_model":
        write_first_layers(target, _LAYERS, work / "initial")
        more = ("--initial-draft", str(work / "initial"))
    _forget_other_recipe(work, kind, folder.name)
    command = [sys.executable, "-m", "specdec.commands.main", "train", kind, "--target", str(target)]
    command += ["--prompts", str(work / "prompts.jsonl"), "--held-out", str(work / "held-out.jsonl")]
    command += ["--out", str(folder), "--work", str(work), *RECIPES[kind], *more]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def _forget_other_recipe(work: Path, kind: str, name: str) -> None:
    """Drop the state of a training run by another recipe, which `specdec train` would refuse."""
    owner = work / f"owner-{kind}.txt"
    if owner.is_file() and owner.read_text(encoding="utf-8") != name:
        (work / f"state-{kind}.pt").unlink(missing_ok=True)
    owner.write_text(name, encoding="utf-8")


def write_first_layers(source: Path, layers: tuple[int, ...], folder: Path) -> None:
    """Write a checkpoint of a Llama with these layers only: a draft that knows something before it has learned."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(layers)}), encoding="utf-8")
    kept = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        head, is_layer, rest = name.partition("model.layers.")
        if not is_layer:
            kept[name] = tensor
            continue
        number, _, part = rest.partition(".")
        if int(number) in layers:
            kept[f"{head}model.layers.{layers.index(int(number))}.{part}"] = tensor
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_prompts(target: Path, file: Path, count: int, *, held_out: bool) -> None:
    lines = (
        json.dumps({"token_ids": token_ids, "kind": chat.kind})
        for chat, token_ids in templated(target, chats(count, held_out=held_out))
    )
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RECIPES:
        sys.stdout.write(f"{make_drafter(wanted)}\n")
