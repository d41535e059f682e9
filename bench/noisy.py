"""Drafts that agree less with their target: a checkpoint whose matrices are mixed with noise of the same scale.

Equal sources and shares give equal weights: the noise of a tensor depends on its name alone.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.checkpoints import cache_folder, finished_at_once
from specdec.engine.checkpoints.files import weights_digest


def noisy(source: Path, share: float, cache: Path | None = None) -> Path:
    """Return the folder of a checkpoint with this share of noise, which is made unless the cache has it.

    `share`: 0 changes nothing, 1 leaves no weight of the source's matrices.
    """
    digest = hashlib.blake2b(f"{weights_digest(source)} {share!r}".encode(), digest_size=6).hexdigest()
    folder = (cache or cache_folder()) / f"noisy-{digest}"
    if folder.is_dir():
        return folder
    with finished_at_once(folder) as unfinished:
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        for file in unfinished.glob("*.safetensors"):
            tensors = {name: _mixed(name, tensor, share) for name, tensor in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _mixed(name: str, tensor: torch.Tensor, share: float) -> torch.Tensor:
    if tensor.ndim < 2:
        return tensor
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    weights = tensor.float()
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed)) * weights.std()
    return ((1 - share) * weights + share * noise).to(tensor.dtype)
