"""A tokenizer's files as transformers saves them: the chat templates beside its configuration, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def with_chat_template(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """A tokenizer's configuration with the templates of its folder, which take the place of its own.

    chat_template.jinja is the default one; additional_chat_templates/NAME.jinja are those with a name.
    """
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    default = directory / "chat_template.jinja"
    if default.is_file():
        named["default"] = default
    if not named:
        return dict(config)
    texts = {name: file.read_text(encoding="utf-8") for name, file in named.items()}
    own = config.get("chat_template")
    if isinstance(own, str):
        texts = {"default": own, **texts}
    if texts.keys() == {"default"}:
        return {**config, "chat_template": texts["default"]}
    return {**config, "chat_template": [{"name": name, "template": text} for name, text in texts.items()]}


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def tokenizer_digest(tokenizer_json: str) -> str:
    """Hex digest of a tokenizer's content, independent of formatting."""
    content = canonical_json(json.loads(tokenizer_json))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
