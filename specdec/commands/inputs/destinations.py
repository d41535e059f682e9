"""Checks that a command can write its files, before it measures for minutes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import typer


def report_folder(folder: Path | None) -> Path | None:
    """Option callback: make the folder of a report. Raises typer.BadParameter if that is impossible."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}") from error
        _check_is_writable(folder, folder)
    return folder


def output_file(file: Path | None) -> Path | None:
    """Option callback: check that a file can be written. Raises typer.BadParameter."""
    if file is not None:
        if not file.parent.is_dir():
            raise typer.BadParameter(f"cannot write {file}: there is no folder {file.parent}")
        if not file.exists():
            _check_is_writable(file.parent, file)
        elif not os.access(file, os.W_OK):
            raise typer.BadParameter(f"cannot write to {file}: no permission")
    return file


def _check_is_writable(folder: Path, path: Path) -> None:
    """Raises typer.BadParameter, naming `path`. It writes, because a file system may refuse in spite of permissions."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {path}: {error.strerror}") from error
