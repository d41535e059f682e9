"""Flags of `specdec generate` that describe a request, and the request they make."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from specdec.v1 import common_pb2, coordinator_pb2

_T = TypeVar("_T")

_PROMPT, _SAMPLING, _LENGTH, _SPECULATION = "Prompt", "Sampling", "Length and stop", "Speculation"


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
TruncatePromptTokens = Annotated[int | None, _option("Keep only this many tokens at the prompt's end.", panel=_PROMPT)]
Temperature = Annotated[float | None, _option("0 is greedy decoding. [server's default: 1]", panel=_SAMPLING)]
TopK = Annotated[int | None, _option("Keep the k most likely tokens; 0 keeps all.", panel=_SAMPLING)]
TopP = Annotated[float | None, _option("Keep the smallest set with this probability.", panel=_SAMPLING)]
MinP = Annotated[float | None, _option("Drop tokens below this share of the likeliest.", panel=_SAMPLING)]
RepetitionPenalty = Annotated[float | None, _option("Over prompt and output; 1 is off.", panel=_SAMPLING)]
PresencePenalty = Annotated[float | None, _option("Over the output; 0 is off.", panel=_SAMPLING)]
FrequencyPenalty = Annotated[float | None, _option("Over the output; 0 is off.", panel=_SAMPLING)]
LogitBias = Annotated[
    list[str] | None,
    _option("Added to a token's logit; may be repeated.", panel=_SAMPLING, metavar="ID=BIAS"),
]
AllowedTokenIds = Annotated[
    list[int] | None,
    _option("Sample this token and no other; may be repeated.", "--allowed-token-id", panel=_SAMPLING),
]
BadWords = Annotated[
    list[str] | None, _option("A text that is not to come out; may be repeated.", "--bad-word", panel=_SAMPLING)
]
JsonSchemaFile = Annotated[
    Path | None, _option("A file with a JSON schema that the output must fit.", "--json-schema-file", panel=_SAMPLING)
]
Regex = Annotated[str | None, _option("What the output must match.", "--regex", panel=_SAMPLING)]
GrammarFile = Annotated[
    Path | None, _option("A file with a grammar (Lark) of the output.", "--grammar-file", panel=_SAMPLING)
]
Choices = Annotated[list[str] | None, _option("What the output may be; may be repeated.", "--choice", panel=_SAMPLING)]
Seed = Annotated[int | None, _option("Seed of the noise. [server's default: random]", panel=_SAMPLING)]
NumChoices = Annotated[int | None, _option("Number of choices.", "--n", "-n", panel=_SAMPLING)]
Logprobs = Annotated[int | None, _option("Show log-probabilities, with this many alternatives.", panel=_SAMPLING)]
PromptLogprobs = Annotated[int | None, _option("The same for the prompt's tokens.", panel=_SAMPLING)]
MaxTokens = Annotated[int | None, _option("Most output tokens.", panel=_LENGTH)]
MinTokens = Annotated[int | None, _option("Fewest output tokens.", panel=_LENGTH)]
Stop = Annotated[list[str] | None, _option("A string that ends a choice; may be repeated.", panel=_LENGTH)]
IncludeStop = Annotated[
    bool | None,
    _option("Keep the stop string in the output.", "--include-stop/--no-include-stop", panel=_LENGTH),
]
StopTokenIds = Annotated[
    list[int] | None,
    _option("A token that ends a choice; may be repeated.", "--stop-token-id", panel=_LENGTH),
]
IgnoreEos = Annotated[
    bool | None,
    _option("Go on after end-of-sequence tokens.", "--ignore-eos/--no-ignore-eos", panel=_LENGTH),
]
SkipSpecialTokens = Annotated[
    bool | None,
    _option(
        "Leave special tokens out of the text.",
        "--skip-special-tokens/--no-skip-special-tokens",
        panel=_LENGTH,
    ),
]
Speculate = Annotated[
    bool | None,
    _option("Speculate, or decode plainly.", "--speculation/--no-speculation", panel=_SPECULATION),
]
VerifyModeName = Annotated[
    str | None,
    _option("How to verify. [server's default]", "--verify-mode", panel=_SPECULATION, metavar="coupled|rejection"),
]
RejectionSampleMethod = Annotated[
    str | None,
    _option(
        "How rejection mode decides on a chain. [server's default]",
        "--rejection-sample-method",
        panel=_SPECULATION,
        metavar="standard|block",
    ),
]
MaxDraftTokens = Annotated[int | None, _option("Most draft tokens per step.", panel=_SPECULATION)]
TimePerToken = Annotated[
    float | None,
    _option("Wanted mean time per token, in milliseconds.", "--time-per-token-ms", panel=_SPECULATION),
]

Drafters = Annotated[
    str | None,
    _option("These drafters alone; draft_model is the draft.", "--drafters", panel=_SPECULATION, metavar="NAME,..."),
]
PredictionFile = Annotated[
    Path | None,
    _option("A file with text that the output is expected to have.", "--prediction-file", panel=_SPECULATION),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Where the prompt comes from; exactly one source may be given."""

    argument: str | None = None
    file: Path | None = None
    token_ids: str | None = None
    messages: tuple[str, ...] = ()


def set_prompt(request: coordinator_pb2.GenerateRequest, prompt: PromptOptions) -> None:
    """Set the request's input.

    Raises:
        typer.BadParameter: More than one source, or one that cannot be read.
    """
    given = [prompt.argument is not None, bool(prompt.file), bool(prompt.token_ids), bool(prompt.messages)]
    if sum(given) > 1:
        raise typer.BadParameter("give one of PROMPT, --prompt-file, --token-ids, --message")
    if prompt.token_ids:
        ids = [_parse(int, part, "token id", "--token-ids") for part in prompt.token_ids.split(",")]
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
    """Set what the output must be. Raises typer.BadParameter for more than one form, or a file that cannot be read."""
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
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}", param_hint=flag) from error


def _read_prompt(file: Path | None) -> str:
    if file is not None and str(file) != "-":
        return _read_file(file, "--prompt-file")
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a PROMPT, --prompt-file, --token-ids, --message, or standard input")
    return sys.stdin.read()


def set_drafting(request: coordinator_pb2.GenerateRequest, drafters: str | None, prediction_file: Path | None) -> None:
    """Set who may propose, and what is expected. Raises typer.BadParameter for a file that cannot be read."""
    if drafters is not None:
        request.speculation.drafters.extend(name.strip() for name in drafters.split(",") if name.strip())
    if prediction_file is not None:
        request.prediction.text = _read_file(prediction_file, "--prediction-file")


def _parse_message(text: str) -> coordinator_pb2.ChatMessage:
    role, separator, content = text.partition(":")
    if not separator or not role:
        raise typer.BadParameter(f"{text!r} is not ROLE:CONTENT", param_hint="--message")
    return coordinator_pb2.ChatMessage(role=role.strip(), content=content.lstrip(" "))


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """Parse ID=BIAS entries. Raises typer.BadParameter when one is malformed."""
    bias = {}
    for entry in entries:
        token_id, separator, value = entry.partition("=")
        if not separator:
            raise typer.BadParameter(f"{entry!r} is not ID=BIAS", param_hint="--logit-bias")
        key = _parse(int, token_id, "token id", "--logit-bias")
        bias[key] = _parse(float, value, "number", "--logit-bias")
    return bias


def parse_verify_mode(name: str | None) -> common_pb2.VerifyMode.ValueType:
    """Parse coupled or rejection; None leaves it to the server. Raises typer.BadParameter on other names."""
    if name is None:
        return common_pb2.VERIFY_MODE_UNSPECIFIED
    try:
        return common_pb2.VerifyMode.Value(f"VERIFY_MODE_{name.upper()}")
    except ValueError as error:
        raise typer.BadParameter(f"{name!r} is neither coupled nor rejection", param_hint="--verify-mode") from error


def parse_rejection_method(name: str | None) -> common_pb2.RejectionSampleMethod.ValueType:
    """Parse standard or block; None leaves it to the server. Raises typer.BadParameter on other names."""
    if name is None:
        return common_pb2.REJECTION_SAMPLE_METHOD_UNSPECIFIED
    try:
        return common_pb2.RejectionSampleMethod.Value(f"REJECTION_SAMPLE_METHOD_{name.upper()}")
    except ValueError as error:
        message = f"{name!r} is neither standard nor block"
        raise typer.BadParameter(message, param_hint="--rejection-sample-method") from error


def set_fields(message: coordinator_pb2.SamplingParams | coordinator_pb2.SpeculationParams, **values: object) -> None:
    """Set the scalar fields whose value is not None, so that the server's defaults hold for the others.

    Raises:
        typer.BadParameter: A value that does not fit the field's type, with the flag's name.
    """
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from error


def set_repeated(
    sampling: coordinator_pb2.SamplingParams,
    *,
    logit_bias: list[str] | None,
    stop: list[str] | None,
    stop_token_ids: list[int] | None,
    allowed_token_ids: list[int] | None = None,
    bad_words: list[str] | None = None,
) -> None:
    """Set what may be given several times. Raises typer.BadParameter on values that do not fit."""
    bias = parse_logit_bias(logit_bias or [])
    sampling.stop.extend(stop or [])
    try:
        sampling.logit_bias.update(bias)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--logit-bias") from error
    sampling.bad_words.extend(bad_words or [])
    try:
        sampling.stop_token_ids.extend(stop_token_ids or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--stop-token-id") from error
    try:
        sampling.allowed_token_ids.extend(allowed_token_ids or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--allowed-token-id") from error


def _parse(parse: Callable[[str], _T], text: str, what: str, flag: str) -> _T:
    try:
        return parse(text.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{text.strip()!r} is not a {what}", param_hint=flag) from error
