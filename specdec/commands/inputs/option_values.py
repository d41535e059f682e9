"""Values of flags: lists of numbers, prompts from a file, and files and folders to write.

Where a command shall write is found out before it has measured for minutes, not after.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import typer

from specdec.commands.measuring.prompts import Prompts, PromptsInvalid, read_prompts
from specdec.wire.sampling_limits import RANGES

MOST_TOKENS = 1_000_000
"""Tokens of an answer or a draft that a flag accepts; a deployment refuses more than its own limit."""


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers from 1. Raises typer.BadParameter."""
    numbers = _numbers(text, flag)
    if any(number < 1 or number != int(number) for number in numbers):
        raise typer.BadParameter(f"{text!r} must be whole numbers from 1", param_hint=flag)
    return tuple(map(int, numbers))


def positive_numbers(text: str, flag: str) -> tuple[float, ...]:
    """Parse comma-separated numbers above 0. Raises typer.BadParameter."""
    found = _numbers(text, flag)
    if any(number <= 0 for number in found):
        raise typer.BadParameter(f"{text!r} must be numbers above 0", param_hint=flag)
    return found


def temperatures(text: str, flag: str) -> tuple[float, ...]:
    """Parse comma-separated temperatures that a request may have. Raises typer.BadParameter."""
    found = _numbers(text, flag)
    for value in found:
        if (fault := RANGES["temperature"].fault_of(value)) is not None:
            raise typer.BadParameter(fault, param_hint=flag)
    return found


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a comma-separated list of numbers", param_hint=flag) from None
    if not found or not all(map(math.isfinite, found)):
        raise typer.BadParameter(f"{text!r} must be finite numbers", param_hint=flag)
    return tuple(dict.fromkeys(found))


def prompts_from(path: Path) -> Prompts:
    """Read a file of prompts. Raises typer.BadParameter."""
    try:
        return read_prompts(path)
    except PromptsInvalid as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from error


def no_empty_name(name: str | None) -> str | None:
    """Option callback: an empty variable in a script names no default. Raises typer.BadParameter."""
    if name == "":
        raise typer.BadParameter("is empty: give a name, or leave the flag out")
    return name


def report_folder(folder: Path | None) -> Path | None:
    """Option callback: make a folder to write to. Raises typer.BadParameter if that is impossible."""
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
