"""Flags of a request that are no scalar fields: its prompt, constraint and prediction."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specdec.service.texts import NotText, decoded, read_text
from specdec.v1 import coordinator_pb2

_PROMPT, _CONSTRAINT, _SPECULATION = "Prompt", "Constraint", "Speculation"
_LARGEST_ID = 2**32 - 1


def _option(
    help_text: str, *names: str, panel: str, metavar: str | None = None, envvar: str | None = None
) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, metavar=metavar, envvar=envvar)


PromptArgument = Annotated[
    str | None, typer.Argument(help="The prompt; without one, standard input is read.", show_default=False)
]
PromptFile = Annotated[Path | None, _option("Read the prompt from a file ('-': standard input).", panel=_PROMPT)]
PromptTokenIds = Annotated[
    str | None, _option("The prompt as token ids.", "--token-ids", panel=_PROMPT, metavar="ID,ID,...")
]
Messages = Annotated[
    list[str] | None,
    _option("A chat message; give one flag per message.", "--message", panel=_PROMPT, metavar="ROLE:CONTENT"),
]
JsonSchemaFile = Annotated[
    Path | None, _option("A file with a JSON schema that the output must fit.", "--json-schema-file", panel=_CONSTRAINT)
]
Regex = Annotated[str | None, _option("Regular expression that the output must match.", "--regex", panel=_CONSTRAINT)]
GrammarFile = Annotated[
    Path | None, _option("A file with a grammar (Lark) of the output.", "--grammar-file", panel=_CONSTRAINT)
]
Choices = Annotated[
    list[str] | None, _option("A text that the output may be; may be repeated.", "--choice", panel=_CONSTRAINT)
]
PredictionFile = Annotated[
    Path | None,
    _option("A file with text that the output probably repeats.", "--prediction-file", panel=_SPECULATION),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Sources of the prompt; at most one may be given, else standard input is read."""

    argument: str | None = None
    file: Path | None = None
    token_ids: str | None = None
    messages: tuple[str, ...] = ()


def set_prompt(request: coordinator_pb2.GenerateRequest, prompt: PromptOptions) -> None:
    """Set the request's input.

    Raises:
        typer.BadParameter: more than one source, or an unreadable one.
    """
    given = [prompt.argument is not None, bool(prompt.file), bool(prompt.token_ids), bool(prompt.messages)]
    if sum(given) > 1:
        raise typer.BadParameter("give one of PROMPT, --prompt-file, --token-ids, --message")
    if prompt.token_ids:
        ids = [_parse_token_id(part.strip()) for part in prompt.token_ids.split(",")]
        request.prompt_token_ids.token_ids.extend(ids)
    elif prompt.messages:
        request.messages.messages.extend(_parse_message(message) for message in prompt.messages)
    elif prompt.argument is not None:
        request.prompt = prompt.argument
    else:
        request.prompt = _read_prompt(prompt.file)


def set_constraint(
    sampling: coordinator_pb2.SamplingParams,
    *,
    json_schema_file: Path | None,
    regex: str | None,
    grammar_file: Path | None,
    choices: list[str] | None,
) -> None:
    """Set the constraint of the output. Raises typer.BadParameter for several forms, or an unreadable file."""
    if sum(given is not None for given in (json_schema_file, regex, grammar_file, choices or None)) > 1:
        raise typer.BadParameter("give one of --json-schema-file, --regex, --grammar-file, --choice")
    if json_schema_file is not None:
        sampling.constraint.json_schema = _read_file(json_schema_file, "--json-schema-file")
    elif regex is not None:
        sampling.constraint.regex = regex
    elif grammar_file is not None:
        sampling.constraint.grammar = _read_file(grammar_file, "--grammar-file")
    elif choices:
        sampling.constraint.choice.texts.extend(choices)


def _read_file(file: Path, flag: str) -> str:
    try:
        return read_text(file)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint=flag) from error
    except NotText as fault:
        raise typer.BadParameter(f"{file} {fault}", param_hint=flag) from None


def standard_input() -> str:
    """The text of standard input. Raises typer.BadParameter if it is none."""
    try:
        return decoded(sys.stdin.buffer.read())
    except NotText as fault:
        raise typer.BadParameter(f"the text {fault}", param_hint="standard input") from None


def _read_prompt(file: Path | None) -> str:
    if file is not None and str(file) != "-":
        return _read_file(file, "--prompt-file")
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a PROMPT, --prompt-file, --token-ids, --message, or standard input")
    return standard_input()


def set_prediction(request: coordinator_pb2.GenerateRequest, file: Path | None) -> None:
    """Set the expected output. Raises typer.BadParameter for an unreadable file."""
    if file is not None:
        request.prediction.text = _read_file(file, "--prediction-file")


def _parse_token_id(text: str) -> int:
    if not text.isdecimal() or (token_id := int(text)) > _LARGEST_ID:
        raise typer.BadParameter(f"{text!r} is not a token id", param_hint="--token-ids")
    return token_id


def _parse_message(text: str) -> coordinator_pb2.ChatMessage:
    role, separator, content = text.partition(":")
    if not separator or not role:
        raise typer.BadParameter(f"{text!r} is not ROLE:CONTENT", param_hint="--message")
    return coordinator_pb2.ChatMessage(role=role.strip(), content=content.lstrip(" "))
