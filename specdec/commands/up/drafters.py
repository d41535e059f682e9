"""Drafters named on a command line, as a target's setting."""

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
    """The target's setting `drafters` for names, of heads with `=FOLDER` where it is not the one that ships.

    `target`: a folder or hub id; None: the shipped one.

    Raises typer.BadParameter: there is no such drafter, or no such head for this target.
    """
    found = [_options(name, target) for name in names if name != DRAFT_MODEL]
    return {"drafters": json.dumps(found)} if found else {}


def expanded(section: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `specdec up`, with its flag `drafter` as what it stands for: a setting of the target, and no draft.

    Raises typer.BadParameter as `drafter_settings` does.
    """
    values = dict(section)
    names = values.pop("drafter", None) or ()
    names = [names] if isinstance(names, str) else [str(name) for name in names]
    found = drafter_settings(names, target=str(values.get("target") or "") or None)
    others = list(values.get("target_set") or ())
    if found and any(str(entry).partition("=")[0].strip() == "drafters" for entry in others):
        raise typer.BadParameter("--target-set names drafters, too", param_hint="--drafter")
    values["target_set"] = [*others, *(f"{name}={value}" for name, value in found.items())]
    if names and not values.get("draft") and DRAFT_MODEL not in names:
        values["num_drafts"] = 0
    return values


def _options(name: str, target: str | None) -> dict[str, str]:
    method, separator, folder = name.partition("=")
    if method not in DRAFTER_NAMES:
        known = ", ".join(sorted({DRAFT_MODEL, *DRAFTER_NAMES}))
        raise typer.BadParameter(f"there is no drafter {method!r}, only {known}", param_hint="--drafter")
    if method not in HEAD_NAMES:
        if separator:
            raise typer.BadParameter(f"{method} has no files", param_hint="--drafter")
        return {"method": method}
    if not separator:
        shipped = shipped_head(method)
        if shipped is None or not _is_shipped(target):
            raise typer.BadParameter(
                f"no head {method} ships for this target: name one ({method}=FOLDER), or make one (specdec train)",
                param_hint="--drafter",
            )
        folder = str(shipped)
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise typer.BadParameter(f"{folder} has no config.json", param_hint="--drafter")
    return {"method": method, "model": folder}


def _is_shipped(target: str | None) -> bool:
    """Whether it is the target that ships: by its folder, or as a copy of it by its weights."""
    if target is None:
        return True
    pair, folder = shipped_pair(), Path(target).expanduser()
    if pair is None or not folder.is_dir():
        return False
    shipped = pair / "target"
    if folder.samefile(shipped):
        return True
    # Reading a large model would take seconds; one of another size is another one.
    return _sizes(folder) == _sizes(shipped) and weights_digest(folder) == weights_digest(shipped)


def _sizes(folder: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]
