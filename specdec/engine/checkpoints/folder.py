"""Checks the files of a model's folder before transformers reads them: each fault is one line with file and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.engine.errors import ModelLoadError

_POINTER, _GGUF = b"version https://git-lfs", b"GGUF"
_SHARD = re.compile(r"-of-\d{5}\.safetensors$")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_HEADER_BYTES = 100_000_000  # as in safetensors' own reader
_MOST_NAMES = 8


def check_folder(path: Path) -> None:
    """Check that an existing path is a model's folder. Raises ``ModelLoadError``."""
    try:
        _check_kind(path)
    except OSError as error:
        raise ModelLoadError(f"model: {path} cannot be read: {error.strerror}") from error


def _check_kind(path: Path) -> None:
    if not path.is_dir():
        if path.suffix.lower() == ".gguf" or (path.is_file() and _start_of(path, len(_GGUF)) == _GGUF):
            raise ModelLoadError(_gguf(path))
        raise ModelLoadError(f"model: {path} is a file; give the folder with config.json and *.safetensors")
    if (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise ModelLoadError(_adapter(path))
    if file := _first(path, ".gguf"):
        raise ModelLoadError(_gguf(file))
    if (path / "params.json").is_file():
        raise ModelLoadError(
            f"model: {path} is in its author's own format (params.json); download the files of transformers' format, "
            "which has a config.json"
        )
    if (path / "model_index.json").is_file():
        raise ModelLoadError(f"model: {path} is a pipeline of diffusers, which generates no text")
    within = sorted(file.parent for pattern in ("*", "snapshots/*") for file in path.glob(f"{pattern}/config.json"))
    hint = f"; give {within[-1]}, which has one" if within else ""
    raise ModelLoadError(f"model: {path} has no config.json; it holds {names_in(path)}{hint}")


def check_weights(path: Path) -> None:
    """Check that a folder has whole safetensors files. Cost: their headers. Raises ``ModelLoadError``."""
    files = sorted(path.glob("*.safetensors"))
    if (path / "adapter_config.json").is_file() and all(file.name.startswith("adapter") for file in files):
        raise ModelLoadError(_adapter(path))
    if not files:
        if file := _first(path, ".gguf"):
            raise ModelLoadError(_gguf(file))
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
    elif all(_SHARD.search(file.name) for file in files):
        raise ModelLoadError(f"model: {path} has parts such as {files[0].name}, and no {index.name}; download it")


def tensor_bytes(file: Path) -> dict[str, int]:
    """Bytes of each tensor of a safetensors file, from its header. Raises ``ModelLoadError`` as `check_weights`."""
    return {name: last - first for name, (first, last), _ in _tensors(file)}


def tensor_types(file: Path) -> dict[str, str]:
    """Type of each tensor of a safetensors file, such as BF16, from its header. Raises ``ModelLoadError`` as
    `check_weights`.
    """
    return {name: dtype for name, _, dtype in _tensors(file)}


def weight_files(path: Path) -> list[Path]:
    """The files of a folder that hold its weights, as it may hold them in its author's own form as well."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / name for name in sorted(set(map(str, read_json(index).get("weight_map", {}).values())))]
    whole = path / "model.safetensors"
    return [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ``ModelLoadError``."""
    try:
        text = file.read_text(encoding="utf-8")
        if text.startswith(_POINTER.decode()):
            raise ModelLoadError(_pointer(file))
        content = json.loads(text)
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
    try:
        size = file.stat().st_size
        _start_of(file, 1)
    except OSError as error:  # a link to nothing, no permission
        raise ModelLoadError(f"model: {file} cannot be read: {error.strerror}; download it again") from error
    length, ends = _header_bytes(file, size), [last for _, (_, last), _ in _tensors(file)]
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        raise ModelLoadError(f"model: {file} is cut off: {size} of {wanted} bytes; download it again")


def _header_bytes(file: Path, size: int) -> int:
    start = _start_of(file, len(_POINTER))
    if start == _POINTER:
        raise ModelLoadError(_pointer(file))
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise ModelLoadError(f"model: {file} is cut off or no safetensors file ({size} bytes); download it again")
    return length


def _tensors(file: Path) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Name, first and last byte, and type of each tensor."""
    length = _header_bytes(file, file.stat().st_size)
    with file.open("rb") as stream:
        stream.seek(8)
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    yield name, (int(first), int(last)), str(entry["dtype"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"model: {file} is no safetensors file: {error}; download it again") from error


def _start_of(file: Path, num_bytes: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(num_bytes)


def _first(path: Path, suffix: str) -> Path | None:
    return min((file for file in path.iterdir() if file.suffix.lower() == suffix), default=None)


def _pointer(file: Path) -> str:
    return f"model: {file} is a pointer of Git LFS, not the file; run git lfs pull in its folder"


def _adapter(path: Path) -> str:
    base = read_json(path / "adapter_config.json").get("base_model_name_or_path") or "its base model"
    return (
        f"model: {path} is a LoRA adapter of {base}; merge them (peft: merge_and_unload, save_pretrained) and give "
        "the merged model's folder"
    )


def _gguf(file: Path) -> str:
    return (
        f"model: {file} is a GGUF file; only safetensors are read: save_pretrained of transformers' "
        f"from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}) makes such a folder"
    )
