"""Converts tokenizers without tokenizer.json, as far as transformers and the installed packages can.

The result is kept in the user's cache, by a digest of the files, because conversion takes up to minutes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from specdec.engine.checkpoints.folder import names_in
from specdec.engine.errors import ModelLoadError

_SOURCES = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model", "spiece.model")
_PACKAGES = "pip install sentencepiece tiktoken protobuf"


def converted_tokenizer(directory: Path) -> str:
    """The content of tokenizer.json for a folder without one; "" if it has no file of a tokenizer either.

    Raises ``ModelLoadError`` if the files cannot be converted.
    """
    sources = [directory / name for name in _SOURCES if (directory / name).is_file()]
    sources += [file for file in sorted(directory.glob("*.tiktoken")) if file not in sources]
    if not sources:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for file in [*sources, directory / "tokenizer_config.json"]:
        digest.update(file.name.encode() + (file.read_bytes() if file.is_file() else b""))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "tokenizers"
    kept = cache / f"{digest.hexdigest()}.json"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    text = _convert(directory, sources)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cache, encoding="utf-8", delete=False) as written:
        written.write(text)
    Path(written.name).replace(kept)
    return text


def require_tokenizer(directory: Path, text: str) -> None:
    """Raise ``ModelLoadError`` if a folder's tokenizer is missing."""
    if not text:
        raise ModelLoadError(
            f"model: {directory} has no tokenizer.json, nor a tokenizer that could be converted; it holds "
            f"{names_in(directory)}: add the tokenizer's files"
        )


def _convert(directory: Path, sources: list[Path]) -> str:
    from transformers import AutoTokenizer

    names = ", ".join(file.name for file in sources)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # converters raise many unrelated types
        reason = " ".join(str(error).split())[:200]
        raise ModelLoadError(
            f"model: {directory} has no tokenizer.json, and {names} cannot be converted ({reason}); "
            f"{_PACKAGES}, or add a tokenizer.json"
        ) from error
