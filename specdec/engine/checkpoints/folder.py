"""Checks the files of a model's folder before transformers reads them: each fault is one line with file and remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.engine.errors import ModelLoadError

_POINTER = b"version https://git-lfs"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_HEADER_BYTES = 100_000_000  # as in safetensors' own reader
_MOST_NAMES = 8


def check_folder(path: Path) -> None:
    """Check that an existing path is a model's folder. Raises ``ModelLoadError``."""
    if path.is_file():
        if path.suffix == ".gguf":
            raise ModelLoadError(_gguf(path))
        raise ModelLoadError(f"model: {path} is a file; give the folder with config.json and *.safetensors")
    if (path / "config.json").is_file():
        return
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path") or "its base model"
        raise ModelLoadError(
            f"model: {path} is a LoRA adapter of {base}; merge them (peft: merge_and_unload, save_pretrained) and give "
            "the merged model's folder"
        )
    if file := next(iter(sorted(path.glob("*.gguf"))), None):
        raise ModelLoadError(_gguf(file))
    raise ModelLoadError(f"model: {path} has no config.json; it holds {names_in(path)}")


def check_weights(path: Path) -> None:
    """Check that a folder has whole safetensors files. Cost: their headers. Raises ``ModelLoadError``."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
        if pickled:
            raise ModelLoadError(
                f"model: {path} has only pickled weights ({pickled[0]}), which can run code; "
                "only safetensors are read: if you trust them, load them with transformers and save_pretrained"
            )
        raise ModelLoadError(f"model: {path} has no *.safetensors; it holds {names_in(path)}")
    for file in files:
        _check_file(file)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = set(map(str, read_json(index).get("weight_map", {}).values()))
        if missing := sorted(listed - {file.name for file in files}):
            raise ModelLoadError(f"model: {path} lacks {missing[0]}, which {index.name} names; download it again")


def tensor_bytes(file: Path) -> dict[str, int]:
    """Bytes of each tensor of a safetensors file, from its header. Raises ``ModelLoadError`` as `check_weights`."""
    return {name: int(last) - int(first) for name, (first, last) in _offsets(file)}


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ``ModelLoadError``."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelLoadError(f"model: {file} cannot be read: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"model: {file} is no JSON object; download it again")
    return content


def names_in(path: Path) -> str:
    """Names of a folder's files, for an error."""
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "nothing") + more


def _check_file(file: Path) -> None:
    size = file.stat().st_size
    length, ends = _header_bytes(file, size), [last for _, (_, last) in _offsets(file)]
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        raise ModelLoadError(f"model: {file} is cut off: {size} of {wanted} bytes; download it again")


def _header_bytes(file: Path, size: int) -> int:
    with file.open("rb") as stream:
        start = stream.read(len(_POINTER))
    if start == _POINTER:
        raise ModelLoadError(f"model: {file} is a pointer of Git LFS, not the file; run git lfs pull in its folder")
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise ModelLoadError(f"model: {file} is cut off or no safetensors file ({size} bytes); download it again")
    return length


def _offsets(file: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    length = _header_bytes(file, file.stat().st_size)
    with file.open("rb") as stream:
        stream.seek(8)
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    yield name, (int(first), int(last))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"model: {file} is no safetensors file: {error}; download it again") from error


def _gguf(file: Path) -> str:
    return (
        f"model: {file} is a GGUF file; only safetensors are read: save_pretrained of transformers' "
        f"from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}) makes such a folder"
    )
