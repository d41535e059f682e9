"""Inflated checkpoints in a cache folder, each under a name that tells its content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bench.inflate import Inflation, Shape, Tensors, describe
from specdec.engine.model.files import weights_digest

_RECIPE = 1
"""Raised when the same source, shape and seed give other weights than before."""
_SHARD_BYTES = 1 << 30
_SEED = 0
_KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
         "chat_template.jinja")  # fmt: skip


def cache_folder() -> Path:
    """`SPECDEC_BENCH_CACHE`, or a folder of the user's cache."""
    own = os.environ.get("SPECDEC_BENCH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "specdec" / "bench"


def inflated(source: Path, shape: Shape, name: str, device: str = "cpu", cache: Path | None = None) -> Path:
    """Return the folder of an inflated checkpoint, which is made, on the device, unless the cache has it.

    Raises InflationImpossible, and OSError where the disk is full.
    """
    content = f"{_RECIPE} {_SEED} {torch.device(device).type} {weights_digest(source)} {describe(shape)}"
    config = (source / "config.json").read_text()
    digest = hashlib.blake2b(f"{content} {config}".encode(), digest_size=6).hexdigest()
    folder = (cache or cache_folder()) / f"{name}-{digest}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        write_inflated(source, shape, unfinished, device)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_inflated(source: Path, shape: Shape, folder: Path, device: str = "cpu") -> None:
    """Write an inflated checkpoint, with its source's tokenizer. Weights come to the CPU a shard at a time.

    Raises InflationImpossible.
    """
    weights: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file, device=device)
    inflation = Inflation(json.loads((source / "config.json").read_text()), weights, shape, _SEED)
    writer = _ShardWriter(folder)
    for part in inflation.parts():
        writer.add(part)
    writer.close()
    (folder / "config.json").write_text(json.dumps(inflation.config(), indent=1) + "\n")
    for name in _KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


class _ShardWriter:
    """Collects tensors, and writes them whenever they fill a shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: Tensors = {}
        self._file_of: dict[str, str] = {}
        self._num_shards = 0
        self._total_bytes = 0

    def add(self, tensors: Tensors) -> None:
        """Take tensors."""
        self._pending |= tensors
        if sum(tensor.nbytes for tensor in self._pending.values()) >= _SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the index."""
        self._flush()
        if self._num_shards == 1:
            (self._folder / "model-00001.safetensors").rename(self._folder / "model.safetensors")
            return
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._file_of}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    def _flush(self) -> None:
        if not self._pending:
            return
        self._num_shards += 1
        name = f"model-{self._num_shards:05}.safetensors"
        save_file(self._pending, self._folder / name, metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(self._pending, name)
        self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._pending = {}


def num_parameters(folder: Path) -> int:
    """Of a checkpoint, by the shapes in its files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total
