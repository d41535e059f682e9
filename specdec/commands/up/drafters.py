"""The target's setting `drafters`, made from names on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from specdec.commands.shipped_pair import shipped_head, shipped_pair
from specdec.config.drafter_options import DRAFT_MODEL, DRAFTER_NAMES, HEAD_NAMES
from specdec.engine.checkpoints.files import weights_digest


def drafter_settings(names: Sequence[str], *, target: str | None) -> dict[str, object]:
    """The target's setting `drafters` for names; a head that does not ship has `=FOLDER` after its name.

    `target` is a folder or hub id; None: the shipped one. Raises typer.BadParameter if there is no such drafter, or no
    such head for this target.
    """
    found = [_options(name, target) for name in names if name != DRAFT_MODEL]
    return {"drafters": json.dumps(found)} if found else {}


def expanded(section: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of `specdec up` with `drafter` replaced by the target's setting, and by `num_drafts` 0.

    Raises typer.BadParameter as `drafter_settings` does.
    """
    values = dict(section)
    names = values.pop("drafter", None) or ()
    names = [names] if isinstance(names, str) else [str(name) for name in names]
    found = drafter_settings(names, target=str(values.get("target") or "") or None)
    others = list(values.get("target_set") or ())
    if found and any(str(entry).partition("=")[0].strip() == "drafters" for entry in others):
        raise typer.BadParameter("--target-set sets drafters already", param_hint="--drafter")
    values["target_set"] = [*others, *(f"{name}={value}" for name, value in found.items())]
    if names and not values.get("draft") and DRAFT_MODEL not in names:
        values["num_drafts"] = 0
    return values


def _options(name: str, target: str | None) -> dict[str, str]:
    method, separator, folder = name.partition("=")
    if method not in DRAFTER_NAMES:
        known = ", ".join(sorted({DRAFT_MODEL, *DRAFTER_NAMES}))
        raise typer.BadParameter(f"{method!r} is no drafter; there are {known}", param_hint="--drafter")
    if method not in HEAD_NAMES:
        if separator:
            raise typer.BadParameter(f"{method} takes no folder", param_hint="--drafter")
        return {"method": method}
    if method == "mtp" and not separator:
        return {"method": method}  # it is in the target's own files
    if not separator:
        shipped = shipped_head(method)
        if shipped is None or not _is_shipped(target):
            raise typer.BadParameter(
                f"no {method} head ships for this target: give {method}=FOLDER, or train one (specdec train)",
                param_hint="--drafter",
            )
        folder = str(shipped)
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise typer.BadParameter(f"{folder} has no config.json", param_hint="--drafter")
    return {"method": method, "model": folder}


def _is_shipped(target: str | None) -> bool:
    """Whether a target is the shipped one, or has equal weights."""
    if target is None:
        return True
    pair, folder = shipped_pair(), Path(target).expanduser()
    if pair is None or not folder.is_dir():
        return False
    shipped = pair / "target"
    if folder.samefile(shipped):
        return True
    # Sizes are compared first, because the digest of a large model takes seconds.
    return _sizes(folder) == _sizes(shipped) and weights_digest(folder) == weights_digest(shipped)


def _sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]
