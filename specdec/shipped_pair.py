"""Where the pair that ships is: in a checkout, or in a package of its own."""

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
