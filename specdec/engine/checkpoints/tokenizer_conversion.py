"""Converts tokenizers without tokenizer.json, as far as transformers and the installed packages can.

The result is kept in the user's cache, by a digest of the files, because conversion takes up to minutes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from specdec.engine.checkpoints.folder import names_in, read_json
from specdec.engine.checkpoints.sentencepiece_files import convert_sentencepiece
from specdec.engine.checkpoints.tiktoken_files import NotConvertible, convert_tiktoken, is_tiktoken
from specdec.engine.errors import ModelLoadError

_TEKKEN = "tekken.json"
_SOURCES = ("tokenizer.model", _TEKKEN, "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model", "spiece.model")
_CONFIGS = ("tokenizer_config.json", "config.json")
_FIRST: Mapping[str, Any] = {"add_bos_token": True, "bos_token": "<s>"}
"""What Llama's and Mistral's formats add to each text, unless tokenizer_config.json says otherwise."""
_PACKAGES = "pip install sentencepiece mistral-common"
_VERSION = 2
"""Part of the name of a kept conversion: raise it whenever conversions change."""


def converted_tokenizer(directory: Path, config: Mapping[str, Any]) -> str:
    """The content of tokenizer.json for a folder without one, with this content of tokenizer_config.json; "" if it has
    no file of a tokenizer either.

    Raises ``ModelLoadError`` if the files cannot be converted.
    """
    sources = [directory / name for name in _SOURCES if (directory / name).is_file()]
    sources += [file for file in sorted(directory.glob("*.tiktoken")) if file not in sources]
    if not sources:
        return ""
    digest = hashlib.blake2b(f"{_VERSION} {_transformers_version()}".encode(), digest_size=16)
    for file in [*sources, *sorted(directory.glob("*.py")), *(directory / name for name in _CONFIGS)]:
        digest.update(file.name.encode() + (file.read_bytes() if file.is_file() else b""))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "tokenizers"
    kept = cache / f"{digest.hexdigest()}.json"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    text = _convert(directory, sources, config)
    with suppress(OSError):  # without a cache it is converted each time
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache, encoding="utf-8", delete=False) as written:
            written.write(text)
        Path(written.name).replace(kept)
    return text


def _transformers_version() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


def require_tokenizer(directory: Path, text: str) -> None:
    """Raise ``ModelLoadError`` if a folder's tokenizer is missing."""
    if not text:
        raise ModelLoadError(
            f"model: {directory} has no tokenizer.json, nor a tokenizer that could be converted; it holds "
            f"{names_in(directory)}: add the tokenizer's files"
        )


def _convert(directory: Path, sources: list[Path], config: Mapping[str, Any]) -> str:
    from transformers import AutoTokenizer
    from transformers.integrations.mistral.tokenizer import MistralConverter

    names = ", ".join(file.name for file in sources)
    written = directory / "config.json"
    model_type = str(read_json(written).get("model_type")) if written.is_file() else ""
    try:
        if is_tiktoken(sources[0]):
            return _with_ends(convert_tiktoken(sources[0], config, model_type), config)
        if sources[0].suffix == ".model":
            text, first = convert_sentencepiece(sources[0])
            return _with_ends(text, {**_FIRST, "bos_token": first, **config})
        if sources[0].name == _TEKKEN:
            return _with_ends(MistralConverter(str(sources[0])).converted().to_str(), {**_FIRST, **config})
        # None for trust_remote_code would ask on the terminal, and wait.
        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        return str(loaded.backend_tokenizer.to_str())
    except NotConvertible as error:
        raise ModelLoadError(
            f"model: {directory} has no tokenizer.json, and {names} cannot be converted: {error}; add a tokenizer.json"
        ) from error
    except Exception as error:  # converters raise many unrelated types
        reason = " ".join(str(error).split())[:200]
        raise ModelLoadError(
            f"model: {directory} has no tokenizer.json, and {names} cannot be converted ({reason}); "
            f"{_PACKAGES}, or add a tokenizer.json"
        ) from error


def _with_ends(text: str, config: Mapping[str, Any]) -> str:
    """A tokenizer that adds the first and last tokens of its configuration to each text."""
    tokenizer = Tokenizer.from_str(text)
    ids: dict[str, int] = {}

    def end(flag: str, name: str) -> str:
        token = config.get(name) if config.get(flag) else None
        content = token.get("content") if isinstance(token, Mapping) else token
        number = tokenizer.token_to_id(content) if isinstance(content, str) else None
        if number is None:
            return ""
        ids[str(content)] = number
        return str(content)

    first, last = end("add_bos_token", "bos_token"), end("add_eos_token", "eos_token")
    single = " ".join(filter(None, (first, "$A", last)))
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=list(ids.items())
        )
    return str(tokenizer.to_str())
