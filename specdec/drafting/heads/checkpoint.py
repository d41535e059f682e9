"""Reads a head's config and tensors. Executes nothing in the files and checks every tensor's name, shape and values."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from specdec.engine.errors import ModelLoadError

PICKLED = ("medusa_lm_head.pt", "pytorch_model.bin")
UNUSED = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors of published heads that no head here reads."""
_NAMED = 8
"""Tensors named in an error, at most."""


class HeadRefused(ModelLoadError):
    """Files that are no head, or do not fit the target. The message names the file, field or tensor."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The files of a head's folder."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    """Tensors by their stored names, on the CPU in their stored dtypes."""


def read_head_files(directory: str | Path) -> HeadFiles:
    """Read a folder's config.json and its tensors: safetensors, or else medusa_lm_head.pt or pytorch_model.bin.

    Pickled files may hold tensors only. Raises HeadRefused.
    """
    path = Path(directory).expanduser()
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise HeadRefused(f"{path}: no config.json can be read ({error.strerror})") from error
    except ValueError as error:
        raise HeadRefused(f"{path}/config.json: {error}") from error
    if not isinstance(config, dict):
        raise HeadRefused(f"{path}/config.json: must be a JSON object")
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        tensors |= read_tensors(file)
    if not files:
        pickled = next((path / name for name in PICKLED if (path / name).is_file()), None)
        if pickled is None:
            raise HeadRefused(f"{path}: has neither *.safetensors nor {' nor '.join(PICKLED)}")
        tensors = _unpickle(pickled)
    return HeadFiles(path, config, tensors)


def read_tensors(file: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file: all, or those in `names`. Raises HeadRefused."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if names is None or name in names}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise HeadRefused(f"{file}: {error}") from error


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise HeadRefused(f"{file}: holds more than tensors, or is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise HeadRefused(f"{file}: must be a dict of tensors")
    return {str(name): value for name, value in loaded.items()}


def renamed(tensors: Mapping[str, torch.Tensor], rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """The tensors under new names. Raises HeadRefused if two get the same name."""
    result: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if (new := rename(name)) in result:
            raise HeadRefused(f"two tensors stand for {new}, one of them {name}")
        result[new] = value
    return result


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], *, unused: Iterable[str] = ()) -> None:
    """Copy tensors into a module's parameters and buffers, by name.

    Raises HeadRefused, which names tensors that are missing, unknown (neither in the module nor `unused`), of a wrong
    shape or not finite.
    """
    wanted = dict(module.state_dict())
    ignored = set(unused)
    _refuse("missing", [name for name in wanted if name not in tensors])
    _refuse("not known", [name for name in tensors if name not in wanted and name not in ignored])
    shapes = ((name, tuple(tensors[name].shape), tuple(own.shape)) for name, own in wanted.items())
    _refuse("of another shape", [f"{name} {has}, not {needs}" for name, has, needs in shapes if has != needs])
    _refuse("no numbers", [name for name in wanted if not bool(torch.isfinite(tensors[name].float()).all())])
    with torch.no_grad():
        for name, own in wanted.items():
            own.copy_(tensors[name])


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise HeadRefused(f"tensors {what}: {', '.join(names[:_NAMED])}{more}")
