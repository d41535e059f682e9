"""The `specdec` command: its sub-commands and its configuration file."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

import specdec
from specdec.cli.bench import bench
from specdec.cli.demo import demo
from specdec.cli.generate import generate
from specdec.cli.health import health
from specdec.cli.keys import keys
from specdec.cli.models import models
from specdec.cli.serve import PASS_THROUGH, serve
from specdec.cli.tune import tune
from specdec.cli.up import up
from specdec.settings_sources import parse_failure

# Every flag has a variable: SPECDEC_GENERATE_TEMPERATURE for `specdec generate --temperature`.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "SPECDEC", "help_option_names": ["-h", "--help"]},
)
app.command()(up)
app.command()(generate)
app.command(context_settings=PASS_THROUGH, add_help_option=False)(serve)
app.command()(models)
app.command()(health)
app.command()(bench)
app.command()(tune)
app.command()(demo)
app.add_typer(keys, name="keys")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specdec {specdec.__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="SPECDEC_CONFIG",
            help="YAML or TOML file: a section per command, a value per flag.",
            dir_okay=False,
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", show_envvar=False, is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Speculative decoding, distributed: a draft guesses, a target verifies, you get the target's output.

    A flag wins over its environment variable, that over the configuration file, that over the default.
    """
    if config is not None:
        context.default_map = {
            command: _by_parameter(context, config, command, section)
            for command, section in read_config(config).items()
        }


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return a file's values by command and flag, with flags' names in either spelling.

    Raises:
        typer.BadParameter: The file cannot be read, does not parse, or names an unknown command.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}", param_hint="--config") from error
    except (ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} does not parse: {parse_failure(error)}", param_hint="--config") from None
    commands = {"up", "generate", "models", "demo", "bench", "tune"}
    values: dict[str, dict[str, Any]] = {}
    for command, section in (content or {}).items():
        if command not in commands or not isinstance(section, dict):
            raise typer.BadParameter(
                f"{path}: {command!r} is not a section of {', '.join(sorted(commands))}",
                param_hint="--config",
            )
        values[command] = {str(name).replace("-", "_"): value for name, value in section.items()}
    return values


def _by_parameter(context: typer.Context, path: Path, command: str, section: dict[str, Any]) -> dict[str, Any]:
    """A section's values by the names of the command's parameters. Raises typer.BadParameter for what is no flag."""
    group: Any = context.command
    parameters = group.get_command(context, command).params
    name_of = {
        flag.lstrip("-").replace("-", "_"): parameter.name for parameter in parameters for flag in parameter.opts
    }
    values = {}
    for flag, value in section.items():
        if flag not in name_of:
            nearest = difflib.get_close_matches(flag, name_of, n=1)
            hint = f"; did you mean {nearest[0].replace('_', '-')}?" if nearest else ""
            raise typer.BadParameter(
                f"{path}: {flag.replace('_', '-')} is not a flag of {command}{hint}", param_hint="--config"
            )
        values[name_of[flag]] = value
    return values
