"""Folder of the shipped pair: in a checkout, or in its own package.

A checkout has the target's weights compressed. `python -m specdec.commands.shipped_pair` unpacks them.
"""

from __future__ import annotations

import lzma
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import specdec

PACKAGE = "specdec_shipped_models"
CHECKOUT = Path(specdec.__file__).resolve().parents[1] / "models"
PACKED = Path("target", "model.safetensors.xz")


def shipped_pair() -> Path | None:
    """Return the folder that has `target`, `draft` and `prompts.json`; None where the pair is not installed."""
    found = find_spec(PACKAGE)
    installed = [] if found is None else found.submodule_search_locations or []
    folders = (CHECKOUT, *map(Path, installed))
    pair = next((folder for folder in folders if (folder / "target" / "config.json").is_file()), None)
    if pair == CHECKOUT and not (pair / PACKED).with_suffix("").exists():
        unpack_weights(pair)
    return pair


def unpack_weights(pair: Path) -> None:
    """Write the target's weights beside their compressed form, in 1.5 s; other processes see all of them or none.

    Raises lzma.LZMAError if the compressed file is damaged (it carries a SHA-256), OSError if the folder is read-only.
    """
    weights = (pair / PACKED).with_suffix("")
    with tempfile.NamedTemporaryFile(dir=weights.parent, prefix=".weights-", delete=False) as unpacked:
        try:
            with lzma.open(pair / PACKED) as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            os.fchmod(unpacked.fileno(), 0o644)
            os.replace(unpacked.name, weights)
        except BaseException:
            os.unlink(unpacked.name)
            raise


def shipped_head(method: str) -> Path | None:
    """Return the folder of a method's head for the shipped target; None if no such head ships."""
    pair = shipped_pair()
    folder = None if pair is None else pair / method
    return folder if folder is not None and (folder / "config.json").is_file() else None


if __name__ == "__main__":
    unpack_weights(CHECKOUT)
