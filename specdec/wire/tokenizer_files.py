"""A tokenizer's files as transformers saves them: what stands beside its configuration, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def whole_config(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """A tokenizer's configuration with what transformers reads beside it: special tokens and chat templates.

    Raises ValueError for a file that is no JSON object.
    """
    return _with_chat_template(_with_special_tokens(config, directory), directory)


def _with_special_tokens(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Configurations without added_tokens_decoder are old: special_tokens_map.json has their special tokens."""
    file = directory / "special_tokens_map.json"
    if "added_tokens_decoder" in config or not file.is_file():
        return dict(config)
    return {**config, **_object(file)}


def _with_chat_template(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Templates in files take the place of the configuration's: chat_template.jinja is the default one, and
    additional_chat_templates/NAME.jinja have names. A processor's chat_template.json is the last resort.
    """
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    default, of_processor = directory / "chat_template.jinja", directory / "chat_template.json"
    if default.is_file():
        named["default"] = default
    if not named:
        if config.get("chat_template") is None and of_processor.is_file():
            return {**config, "chat_template": _object(of_processor).get("chat_template")}
        return config
    texts = {name: file.read_text(encoding="utf-8") for name, file in named.items()}
    own = config.get("chat_template")
    if isinstance(own, str):
        texts = {"default": own, **texts}
    if texts.keys() == {"default"}:
        return {**config, "chat_template": texts["default"]}
    return {**config, "chat_template": [{"name": name, "template": text} for name, text in texts.items()]}


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}; download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no JSON object; download it again")
    return found


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def tokenizer_digest(tokenizer_json: str) -> str:
    """Hex digest of a tokenizer's content, independent of formatting."""
    content = canonical_json(json.loads(tokenizer_json))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
