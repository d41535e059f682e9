"""The `specdec` command: its sub-commands, loaded when they are called, and its configuration file."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import specdec
from specdec.commands.health import probe
from specdec.commands.serve import serve
from specdec.service.texts import fault_of

_LOADED_LATER = {
    "up": (
        "specdec.commands.up.command",
        "Start target, draft, coordinator and gateway on this machine; Ctrl-C stops all.",
    ),
    "generate": ("specdec.commands.generate.command", "Complete a prompt and stream the text."),
    "models": ("specdec.commands.models", "Show the served model and the state of every replica."),
    "bench": (
        "specdec.commands.bench",
        "Measure a deployment: speed, times and acceptance by load, with and without speculation.",
    ),
    "tune": (
        "specdec.commands.tune.command",
        "Measure step times and acceptance of a pair on this machine, and advise settings.",
    ),
    "plan": (
        "specdec.plan.command",
        "Find the cheapest deployment that holds objectives for a load, by simulation.",
    ),
    "train": (
        "specdec.commands.train.command",
        "Train a small draft or a head (EAGLE-3, DSpark, Medusa) for a target, in a format of other engines.",
    ),
    "debug": ("specdec.commands.debug.command", "Show a request step by step."),
    "audit": (
        "specdec.commands.audit.command",
        "Compare a running service with its checkpoint, which transformers runs on this machine's CPU.",
    ),
    "doctor": (
        "specdec.commands.doctor.command",
        "Check a deployment: each line is pass, warn or fail, with measurement and remedy.",
    ),
    "drafters": (
        "specdec.commands.drafters",
        "Show a target's own drafters, or exchange them while it serves; its output stays the same.",
    ),
    "demo": (
        "specdec.commands.demo",
        "Start the shipped pair on free ports, complete a prompt with and without speculation, and stop.",
    ),
    "fetch": (
        "specdec.commands.fetch",
        "Download a model's files into the cache, where services find them.",
    ),
    "keys": ("specdec.commands.keys", "Make API keys for a coordinator with api_keys_file."),
}
"""By command: the module that has it under its name, and the first sentence of its help."""
_LONGEST_SUMMARY = 200
# The service, or the health check, parses its flags and has its own --help.
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


class _Commands(TyperGroup):
    """Imports a command's module when that command is called: an image has only its own commands' packages."""

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
    command = _checked(typer.main.get_command(found))
    for option in command.params:
        flag = max(option.opts, key=len)
        if option.envvar is None and flag.startswith("--"):
            option.envvar = f"SPECDEC_{name}_{flag[2:].replace('-', '_')}".upper()
    return command


def _checked(command: Any) -> Any:
    """The command, or group, with checked texts: arguments and variables may hold any bytes."""
    for one in getattr(command, "commands", {}).values():
        _checked(one)
    call = command.callback
    if call is None:
        return command
    parameters = {parameter.name: parameter for parameter in command.params}

    @functools.wraps(call)
    def checked(*args: Any, **values: Any) -> Any:
        for name, value in values.items():
            if (fault := fault_of(value)) is not None:
                raise typer.BadParameter(f"the value {fault}", param=parameters.get(name))
        return call(*args, **values)

    command.callback = checked
    return command


def _not_loaded_yet() -> None:
    """Placeholder in the list of commands."""


# Every flag has a variable: SPECDEC_GENERATE_TEMPERATURE for `specdec generate --temperature`. `_loaded` names it after
# the flag, where click would take the parameter's name. This help and errors of flags are plain text, because rich's
# frames would double the time.
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
    """Ask a service whether it can serve: exit code 0 if it is SERVING, for health checks."""
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
            help="YAML or TOML file with a section per command and a value per flag.",
            dir_okay=False,
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", show_envvar=False, is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Distributed speculative decoding: a draft proposes tokens, a target verifies them; the output is the target's.

    A flag wins over its environment variable, the variable over the file of --config, the file over the default.
    """
    command = context.invoked_subcommand
    if config is not None and command is not None:
        from specdec.commands.inputs.config_file import by_parameter, read_config

        section = read_config(config).get(command, {})
        group: Any = context.command
        context.default_map = {command: by_parameter(group.get_command(context, command), config, command, section)}
