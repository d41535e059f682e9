"""The command's configuration file: a section per command, a value per flag."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml

from specdec.config.sources import parse_failure
from specdec.service.texts import read_text

_COMMANDS = {
    *("up", "generate", "models", "demo", "bench", "tune", "plan"),
    *("train", "debug", "audit", "doctor", "drafters", "fetch"),
}


def read_config(path: Path, param_hint: str = "--config") -> dict[str, dict[str, Any]]:
    """Return a file's values by command and flag; `-` and `_` in flags' names are equal.

    Args:
        path: the file; it and its sections may be empty.
        param_hint: the flag that named the file, for messages.

    Raises:
        typer.BadParameter: the file is unreadable or malformed, has no sections, or names an unknown command.
    """
    try:
        text = read_text(path)
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}", param_hint=param_hint) from error
    except (ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} does not parse: {parse_failure(error)}", param_hint=param_hint) from None
    if not isinstance(content, dict | None):
        raise typer.BadParameter(f"{path} holds no sections, such as `up:`", param_hint=param_hint)
    values: dict[str, dict[str, Any]] = {}
    for command, section in (content or {}).items():
        if command not in _COMMANDS:
            raise typer.BadParameter(
                f"{path}: {command!r} is not a section of {', '.join(sorted(_COMMANDS))}", param_hint=param_hint
            )
        if not isinstance(section, dict | None):
            raise typer.BadParameter(f"{path}: the section {command} holds no flags", param_hint=param_hint)
        values[command] = {str(name).replace("-", "_"): value for name, value in (section or {}).items()}
    return values


def by_parameter(
    one: Any, path: Path, command: str, section: dict[str, Any], param_hint: str = "--config"
) -> dict[str, Any]:
    """A section's values by the names of the parameters of a command (`one`).

    Raises typer.BadParameter for a name that is no flag.
    """
    parameters = one.params
    name_of = {
        flag.lstrip("-").replace("-", "_"): parameter.name for parameter in parameters for flag in parameter.opts
    }
    values = {}
    for flag, value in section.items():
        if flag not in name_of:
            nearest = difflib.get_close_matches(flag, name_of, n=1)
            hint = f"; did you mean {nearest[0].replace('_', '-')}?" if nearest else ""
            raise typer.BadParameter(
                f"{path}: {flag.replace('_', '-')} is not a flag of {command}{hint}", param_hint=param_hint
            )
        values[name_of[flag]] = value
    return values
