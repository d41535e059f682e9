"""Inflated checkpoints in a cache folder, each under a digest of its content."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bench.inflate import Inflation, Shape, Tensors, describe
from specdec.engine.checkpoints.files import weights_digest

_RECIPE = 1
"""Version of the inflation; raised when the same source, shape and seed give other weights than before."""
_SHARD_BYTES = 1 << 30
_SEED = 0
_SHARD_ROOM = 1 << 30
"""Bytes left free on each of two disks that share a checkpoint."""
_SLACK = 1.01
_IN_MEMORY = Path("/dev/shm/specdec-bench")
_KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
         "chat_template.jinja")  # fmt: skip


def cache_folder() -> Path:
    """`SPECDEC_BENCH_CACHE`, or a folder of the user's cache."""
    own = os.environ.get("SPECDEC_BENCH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "specdec" / "bench"


def inflated(source: Path, shape: Shape, name: str, device: str = "cpu", cache: Path | None = None) -> Path:
    """Return the folder of an inflated checkpoint, which is made on the device unless the cache has it.

    A checkpoint that the cache's disk has no room for is kept in memory, or divided between both.

    Raises InflationImpossible, and OSError where both together have no room.
    """
    content = f"{_RECIPE} {_SEED} {torch.device(device).type} {weights_digest(source)} {describe(shape)}"
    config = (source / "config.json").read_text()
    digest = hashlib.blake2b(f"{content} {config}".encode(), digest_size=6).hexdigest()
    folders = [each / f"{name}-{digest}" for each in ([cache] if cache else [cache_folder(), _IN_MEMORY])]
    if (made := next((folder for folder in folders if folder.is_dir()), None)) is not None:
        return made
    for each in folders:
        _remove_unfinished(each)
    num_bytes = inflated_bytes(source, shape)
    folder, rest = _roomy(folders, num_bytes)
    with finished_at_once(folder) as unfinished:
        if device == "cpu":
            write_inflated(source, shape, unfinished, device, rest)
        else:  # in a process of its own: its context on the GPU would keep NVIDIA MPS out
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
                child.submit(write_inflated, source, shape, unfinished, device, rest).result()
    return folder


@contextmanager
def finished_at_once(folder: Path) -> Iterator[Path]:
    """A folder to write, which becomes `folder` when it is complete, unless another process made `folder` before."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-{os.getpid()}-", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def inflated_bytes(source: Path, shape: Shape) -> int:
    """Bytes of the weights of an inflated checkpoint, biases not counted."""
    weights: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    inflation = Inflation(json.loads((source / "config.json").read_text()), weights, shape, _SEED)
    head_dim = int(inflation.config()["head_dim"])
    attention = 2 * shape.hidden_size * head_dim * (shape.num_heads + shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    ends = shape.vocab_size * shape.hidden_size * (2 if "lm_head.weight" in weights else 1)
    return (layer * shape.num_layers + shape.hidden_size + ends) * inflation.dtype.itemsize


def _roomy(folders: list[Path], num_bytes: int) -> tuple[Path, Path | None]:
    """The first folder whose disk has room, and None; else the folder with the most room, and a folder for the rest.

    Makes their parents. Raises OSError where the disks together have no room.
    """
    free: dict[Path, int] = {}
    for folder in folders:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free[folder] = shutil.disk_usage(folder.parent).free
        if free[folder] > num_bytes * _SLACK:
            return folder, None
    disks = {_device_of(folder.parent) for folder in folders}
    most, *others = sorted(folders, key=lambda folder: -free[folder])
    if others and len(disks) == len(folders) and sum(free.values()) - len(disks) * _SHARD_ROOM > num_bytes * _SLACK:
        return most, others[0].parent / f"{most.name}-rest"
    found = ", ".join(f"{folder.parent} has {bytes_ / 2**30:.1f}" for folder, bytes_ in free.items())
    raise OSError(errno.ENOSPC, f"{folders[0].name} needs {num_bytes / 2**30:.1f} GiB; {found}")


def _device_of(folder: Path) -> int:
    return folder.stat().st_dev


def _remove_unfinished(folder: Path) -> None:
    """Remove unfinished copies of a checkpoint whose processes have ended."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        pid = left.name.removeprefix(f".{folder.name}-").partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def write_inflated(source: Path, shape: Shape, folder: Path, device: str = "cpu", rest: Path | None = None) -> None:
    """Write an inflated checkpoint, with its source's tokenizer. Weights come to the CPU a shard at a time.

    ``rest``: folder of the shards that the disk of ``folder`` has no room for; ``folder`` gets links to them.

    Raises InflationImpossible.
    """
    weights: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file, device=device)
    inflation = Inflation(json.loads((source / "config.json").read_text()), weights, shape, _SEED)
    writer = _ShardWriter(folder, rest)
    for part in inflation.parts():
        writer.add(part)
    writer.close()
    (folder / "config.json").write_text(json.dumps(inflation.config(), indent=1) + "\n")
    for name in _KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


class _ShardWriter:
    """Collects tensors and writes them when they fill a shard."""

    def __init__(self, folder: Path, rest: Path | None) -> None:
        self._folder, self._rest = folder, rest
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
        """Write the last shard and the index."""
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
        save_file(self._pending, self._place_for(name), metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(self._pending, name)
        self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._pending = {}

    def _place_for(self, name: str) -> Path:
        num_bytes = sum(tensor.nbytes for tensor in self._pending.values())
        if self._rest is None or shutil.disk_usage(self._folder).free > num_bytes + _SHARD_ROOM:
            return self._folder / name
        self._rest.mkdir(parents=True, exist_ok=True)
        (self._folder / name).symlink_to(self._rest / name)
        return self._rest / name


def num_parameters(folder: Path) -> int:
    """Parameters of a checkpoint, by the shapes in its files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total
