"""Reads a settings class from flags, environment and a file, with errors that name the setting."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import structlog
import yaml
from pydantic import BaseModel, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from specdec.config.retired import REPLACED, notices
from specdec.service.texts import fault_of, read_text
from specdec.telemetry import setup_logging

_log = structlog.get_logger(__name__)
S = TypeVar("S", bound=BaseModel)
# Kubernetes sets variables for the Services of a namespace. For one named specdec-target: SPECDEC_TARGET_SERVICE_HOST,
# SPECDEC_TARGET_PORT=tcp://10.0.0.1:50052, SPECDEC_TARGET_PORT_50052_TCP_ADDR and more.
_SERVICE_LINK = re.compile(r"^(tcp|udp|sctp)://[^/]+:\d+$")
_SERVICE_LINK_NAME = re.compile(
    r"(^|_)(service_host|service_port(_\w+)?|port_\d+_(tcp|udp|sctp)(_(proto|port|addr))?)$"
)
_INVALID_EXIT_CODE = 2
_QUOTED = re.compile(r"(['\"]).*\1")
# Names of values in --help, by their Python type.
_VALUE_NAMES = {
    "str": "TEXT",
    "SecretStr": "SECRET",
    "Path": "PATH",
    "int": "INTEGER",
    "float": "NUMBER",
    "tuple[int,...]": "LIST",
    "tuple[str,...]": "LIST",
    "tuple[JSON,...]": "LIST",
    "dict[str,Any]": "JSON",
}


class SettingsInvalid(ValueError):
    """Settings that cannot be used; each problem is one line that names the setting and its spellings."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class _Environment(EnvSettingsSource):
    """The environment without the variables that Kubernetes makes up for services."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        variables = super()._load_env_vars()
        return {name: value for name, value in variables.items() if not _SERVICE_LINK.match(value or "")}


def load_settings(cls: type[S], argv: Sequence[str], *, env_prefix: str, prog: str) -> S:
    """Builds settings: flags over environment (`env_prefix` + upper-case name) over file over defaults.

    The file (YAML, TOML or JSON) is named by `--config` or the variable `env_prefix` + CONFIG. `--help`
    prints the flags and exits. A variable with the prefix that names no setting is a problem, unless Kubernetes made
    it up for a Service. Removed settings are ignored. Raises SettingsInvalid with all problems found.
    """
    return _load(cls, argv, env_prefix=env_prefix, prog=prog)[0]


def settings_or_exit(cls: type[S], argv: Sequence[str], *, env_prefix: str, prog: str) -> S:
    """As load_settings, but problems go to standard error, and the process exits with code 2.

    Settings that were replaced or removed are logged, each as `setting_outdated`.
    """
    try:
        settings, outdated = _load(cls, argv, env_prefix=env_prefix, prog=prog)
    except SettingsInvalid as error:
        for problem in error.problems:
            sys.stderr.write(f"{prog}: {problem}\n")
        raise SystemExit(_INVALID_EXIT_CODE) from None
    if outdated:
        service = env_prefix.split("_")[1].lower()
        setup_logging(service, getattr(settings, "log_level", "info"), getattr(settings, "log_format", "json"))
    for name, notice in outdated.items():
        _log.warning("setting_outdated", setting=name, reason=notice)
    return settings


def _load(cls: type[S], argv: Sequence[str], *, env_prefix: str, prog: str) -> tuple[S, dict[str, str]]:
    """The settings, and a notice for each that was replaced or removed and is given, by its name."""
    if unknown := _unknown_variables(cls, os.environ, env_prefix):
        raise SettingsInvalid(unknown)
    arguments, removed_flags = _without_removed(cls, argv)
    file_values = _config_values(argv, env_prefix)
    removed = {name for name in _removed(cls) if name in file_values or _variable(name, env_prefix) is not None}
    reader = _reader(cls, {name: value for name, value in file_values.items() if name not in removed})
    try:
        flags: CliSettingsSource[Any] = CliSettingsSource(
            reader, cli_prog_name=prog, cli_parse_args=arguments, add_argument_method=_add_flag
        )
        loaded = reader(_cli_settings_source=flags, _env_prefix=env_prefix)
    except ValidationError as error:
        problems = {str(problem["loc"][:1]): problem for problem in reversed(error.errors())}
        described = [_describe(cls, problem, env_prefix) for problem in reversed(problems.values())]
        raise SettingsInvalid(described) from error
    except SettingsError as error:
        raise SettingsInvalid([_plain(cls, error)]) from error
    values = {name: getattr(loaded, name) for name in cls.model_fields}
    faults = {name: fault_of(v.get_secret_value() if isinstance(v, SecretStr) else v) for name, v in values.items()}
    if no_texts := [f"{name} {fault} ({_spellings(name, env_prefix)})" for name, fault in faults.items() if fault]:
        raise SettingsInvalid(no_texts)
    inner = {name for value in values.values() if isinstance(value, BaseModel) for name in value.model_extra or ()}
    given = loaded.model_fields_set | removed | removed_flags | (inner & _removed(cls))
    return cls.model_validate(values), notices(frozenset(given))


def _removed(cls: type[BaseModel]) -> frozenset[str]:
    """Removed settings that this service had."""
    return getattr(cls, "removed", frozenset())


def _without_removed(cls: type[BaseModel], argv: Sequence[str]) -> tuple[list[str], set[str]]:
    """The arguments without flags of removed settings and their values, and the names of these settings."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in _removed(cls):
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name)
    try:
        known, others = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise SettingsInvalid([str(error)]) from error
    return others, {name for name, value in vars(known).items() if value is not None}


def _variable(name: str, env_prefix: str) -> str | None:
    variable = f"{env_prefix}{name}".lower()
    return next((value for key, value in os.environ.items() if key.lower() == variable), None)


def _reader(cls: type[S], file_values: Mapping[str, Any]) -> Any:
    """The settings class with sources, and with --config among its flags."""

    def settings_customise_sources(
        reader: type[BaseSettings],
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        environment = _Environment(settings_cls, env_prefix=getattr(env_settings, "env_prefix", None))
        return environment, InitSettingsSource(settings_cls, init_kwargs=dict(file_values))

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__annotations__": {"config": Path | None},
        "config": Field(default=None, description="File with settings (.yaml, .toml or .json)."),
        "model_config": SettingsConfigDict(
            env_ignore_empty=True,
            env_parse_none_str="null",
            cli_parse_none_str="null",
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_exit_on_error=False,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            extra="forbid",
        ),
        "settings_customise_sources": classmethod(settings_customise_sources),
    }
    return type(cls.__name__, (cls, BaseSettings), namespace)


def _add_flag(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
    if "metavar" in options:
        options["metavar"] = _VALUE_NAMES.get(options["metavar"], options["metavar"])
    if names[-1].removeprefix("--").replace("-", "_") in REPLACED:
        options["help"] = argparse.SUPPRESS
    return parser.add_argument(*names, **options)


def _unknown_variables(cls: type[BaseModel], environment: Mapping[str, str], env_prefix: str) -> list[str]:
    """One line for each variable with the service's prefix that names none of its settings."""
    prefix = env_prefix.lower()
    problems = []
    for variable, value in sorted(environment.items()):
        if not variable.lower().startswith(prefix):
            continue
        name = variable[len(prefix) :].lower()
        is_service_link = _SERVICE_LINK.match(value) or _SERVICE_LINK_NAME.search(name)
        if name == "config" or name in cls.model_fields or name in _removed(cls) or is_service_link:
            continue
        problems.append(f"{variable} is not a setting{_nearest(cls, name, env_prefix, str.upper)}")
    return problems


def _nearest(cls: type[BaseModel], name: str, prefix: str = "", spell: Callable[[str], str] = str) -> str:
    """The setting that a wrong name most likely stands for, ready to be appended; empty without a good guess."""
    nearest = difflib.get_close_matches(name, ["config", *(cls.model_fields.keys() - REPLACED.keys())], n=1)
    return f"; did you mean {prefix}{spell(nearest[0])}?" if nearest else ""


def _config_values(argv: Sequence[str], env_prefix: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, _ = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise SettingsInvalid([f"config: {error}"]) from error
    name: str | None = known.config or os.environ.get(f"{env_prefix}CONFIG")
    if not name:
        return {}
    values = _read_file(Path(name))
    if not isinstance(values, dict):
        raise SettingsInvalid([f"config: {name} does not hold a mapping of settings"])
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _read_file(path: Path) -> Any:
    try:
        text = read_text(path)
        match path.suffix:
            case ".yaml" | ".yml":
                return yaml.safe_load(text) or {}
            case ".toml":
                return tomllib.loads(text)
            case ".json":
                return json.loads(text)
    except OSError as error:
        raise SettingsInvalid([f"config: cannot read {path}: {error.strerror}"]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsInvalid([f"config: {path} does not parse: {parse_failure(error)}"]) from None
    raise SettingsInvalid([f"config: {path} is none of .yaml, .yml, .toml, .json"])


def parse_failure(error: yaml.YAMLError | ValueError) -> str:
    """Why a file does not parse, and where. The file is not quoted: the line may hold a password."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(error)
    mark = error.problem_mark
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return f"{_QUOTED.sub('...', error.problem or 'not YAML')}{where}"


def _describe(cls: type[BaseModel], problem: Any, env_prefix: str) -> str:
    location = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if not location:
        return str(message)
    name = str(problem["loc"][0])
    spellings = _spellings(name, env_prefix)
    match problem["type"]:
        case "missing":
            return f"{location} is required: set {spellings}"
        case "extra_forbidden":
            return f"{location} is not a setting{_nearest(cls, name)}"
        case "union_tag_invalid":  # pydantic's words for it are about its own types
            known = str(problem["ctx"]["expected_tags"]).replace("'", "")
            return f"{location}: {problem['ctx']['tag']!r} is none of {known} ({spellings})"
        case _ if _is_secret(cls, name):
            return f"{location}: {message} ({spellings})"
        case _:
            return f"{location}: {message}, got {problem['input']!r} ({spellings})"


def _spellings(name: str, env_prefix: str) -> str:
    return f"--{name.replace('_', '-')}, {env_prefix}{name.upper()}"


def _is_secret(cls: type[BaseModel], name: str) -> bool:
    field = cls.model_fields.get(name)
    return field is not None and SecretStr in (field.annotation, *get_args(field.annotation))


def _plain(cls: type[BaseModel], error: SettingsError) -> str:
    """The message without the library's own words, and the flag that a wrong one most likely stands for."""
    message = str(error).removeprefix("error parsing CLI: ")
    if not message.startswith("unrecognized arguments: "):
        return message
    # Without what follows a flag: of a misspelt --redis-password that is the password.
    wrong = [word.split("=")[0] for word in message.split() if word.startswith("--")]
    if not wrong:
        return message
    hint = _nearest(cls, wrong[0].lstrip("-").replace("-", "_"), "--", lambda known: known.replace("_", "-"))
    return f"unrecognized arguments: {' '.join(wrong)}{hint}"
