"""The `specdec` command: its sub-commands and its configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import specdec
from specdec.commands.audit.command import audit
from specdec.commands.bench import bench
from specdec.commands.debug.command import debug
from specdec.commands.demo import demo
from specdec.commands.doctor.command import doctor
from specdec.commands.drafters import drafters
from specdec.commands.generate.command import generate
from specdec.commands.health import health
from specdec.commands.inputs.config_file import by_parameter, read_config
from specdec.commands.keys import keys
from specdec.commands.models import models
from specdec.commands.serve import PASS_THROUGH, serve
from specdec.commands.train.command import train
from specdec.commands.tune.command import tune
from specdec.commands.up.command import up

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
app.command()(train)
app.command()(debug)
app.command()(audit)
app.command()(doctor)
app.command()(drafters)
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
        group: Any = context.command
        context.default_map = {
            command: by_parameter(group.get_command(context, command), config, command, section)
            for command, section in read_config(config).items()
        }
