"""Where a command shall write: found out before it has measured for minutes, not after."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import typer


def report_folder(folder: Path | None) -> Path | None:
    """A folder for a report, which is made now; callback of an option. Raises typer.BadParameter where it cannot be."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}") from error
        _check_is_writable(folder, folder)
    return folder


def output_file(file: Path | None) -> Path | None:
    """A file to be written, in a folder that is there; callback of an option. Raises typer.BadParameter for others."""
    if file is not None:
        if not file.parent.is_dir():
            raise typer.BadParameter(f"cannot write {file}: there is no folder {file.parent}")
        if not file.exists():
            _check_is_writable(file.parent, file)
        elif not os.access(file, os.W_OK):
            raise typer.BadParameter(f"may not write to {file}")
    return file


def _check_is_writable(folder: Path, path: Path) -> None:
    """Raises typer.BadParameter, naming `path`. Permissions do not tell: a file system may refuse whom they allow."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {path}: {error.strerror}") from error
