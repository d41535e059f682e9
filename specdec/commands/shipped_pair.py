"""Folder of the shipped pair: in a checkout, or in its own package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import specdec

PACKAGE = "specdec_shipped_models"


def shipped_pair() -> Path | None:
    """Return the folder that has `target`, `draft` and `prompts.json`; None where the pair is not installed."""
    found = find_spec(PACKAGE)
    installed = [] if found is None else found.submodule_search_locations or []
    checkout = Path(specdec.__file__).resolve().parents[1] / "models"
    folders = (checkout, *map(Path, installed))
    return next((folder for folder in folders if (folder / "target" / "config.json").is_file()), None)


def shipped_head(method: str) -> Path | None:
    """Return the folder of a method's head for the shipped target; None if no such head ships."""
    pair = shipped_pair()
    folder = None if pair is None else pair / method
    return folder if folder is not None and (folder / "config.json").is_file() else None
