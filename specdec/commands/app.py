"""The `specdec` command: its sub-commands, loaded when they are called, and its configuration file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import specdec
from specdec.commands.health import probe
from specdec.commands.serve import serve

_LOADED_LATER = {
    "up": ("specdec.commands.up.command", "Start target, draft, coordinator and gateway here; stop all on Ctrl-C."),
    "generate": ("specdec.commands.generate.command", "Complete a prompt, as it comes."),
    "models": ("specdec.commands.models", "Show what is served, and what is loaded where."),
    "bench": (
        "specdec.commands.bench",
        "Measure a deployment: speed, times and acceptance by load, with and without speculation.",
    ),
    "tune": (
        "specdec.commands.tune.command",
        "Measure step times and acceptance of a pair here, and say what to set: draft length, width, heads, mode, "
        "place.",
    ),
    "train": (
        "specdec.commands.train.command",
        "Make a small draft or a head (EAGLE-3, DSpark, Medusa) for a target, in a format of other engines.",
    ),
    "debug": ("specdec.commands.debug.command", "Show a request step by step."),
    "audit": (
        "specdec.commands.audit.command",
        "Hold a service that runs against its checkpoint as transformers runs it, here on the CPU.",
    ),
    "doctor": (
        "specdec.commands.doctor.command",
        "Go through the checklist of a deployment: each line pass, warn or fail, what was measured, what to do.",
    ),
    "drafters": (
        "specdec.commands.drafters",
        "Show the drafters that a target runs itself, or exchange them while it serves; its output stays the same.",
    ),
    "demo": (
        "specdec.commands.demo",
        "Start the shipped pair on free ports, complete a prompt with and without speculation, stop.",
    ),
    "keys": ("specdec.commands.keys", "Make API keys for a coordinator with api_keys_file."),
}
"""The module of each command, in which it has its name, and the first sentence of its help."""
_LONGEST_SUMMARY = 200
# The service, or the probe, parses its flags and has its own --help.
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


class _Commands(TyperGroup):
    """Imports a command's module when that command is asked for: an image has what its own commands need."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _LOADED_LATER:
            self.commands[cmd_name] = _loaded(cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(_LONGEST_SUMMARY)) for name, one in self.commands.items()]
            )


def _loaded(name: str) -> Any:
    module, _ = _LOADED_LATER[name]
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, typer.Typer):
        command, found = found, typer.Typer(add_completion=False)
        found.command(name)(command)
    return typer.main.get_command(found)


def _not_loaded_yet() -> None:
    """Stands in the list of commands."""


# Every flag has a variable: SPECDEC_GENERATE_TEMPERATURE for `specdec generate --temperature`. This help and what is
# wrong with flags are plain text: the frames of rich take as long as all the rest.
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"auto_envvar_prefix": "SPECDEC", "help_option_names": ["-h", "--help"]},
)
app.command(context_settings=_PASS_THROUGH, add_help_option=False)(serve)
for _name, (_, _summary) in _LOADED_LATER.items():
    app.command(_name, help=_summary)(_not_loaded_yet)


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def health(context: typer.Context) -> None:
    """Ask a service whether it can serve: exit code 0 if it is SERVING, 1 if not, for health checks."""
    raise typer.Exit(probe(context.args))


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
    command = context.invoked_subcommand
    if config is not None and command is not None:
        from specdec.commands.inputs.config_file import by_parameter, read_config

        section = read_config(config).get(command, {})
        group: Any = context.command
        context.default_map = {command: by_parameter(group.get_command(context, command), config, command, section)}
