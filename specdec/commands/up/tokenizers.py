"""Whether two models have the same tokenizer, as far as their files at hand say."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.checkpoints.files import read_tokenizer


def may_differ(target_model: str, draft_model: str) -> bool:
    """Whether a draft might have to translate: its tokenizer is another one, or not at hand (a hub id)."""
    try:
        target, draft = (_digest(Path(model).expanduser()) for model in (target_model, draft_model))
    except (OSError, ValueError):
        return True
    return target is None or draft is None or target != draft


def _digest(folder: Path) -> str | None:
    return read_tokenizer(folder).digest if (folder / "config.json").is_file() else None
