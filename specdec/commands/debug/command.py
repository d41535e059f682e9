"""`specdec debug`: a request step by step, with proposals, verdicts and their reasons, and times."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf import json_format
from rich.console import Console

from specdec.client import Client, ClientSettings, Completion
from specdec.commands import connection
from specdec.commands import request_options as options
from specdec.commands.debug import debug_view
from specdec.commands.debug.page import page_of
from specdec.commands.debug.steps import Explained, explain, token_ids_of
from specdec.commands.errors import reported_errors
from specdec.commands.field_flags import set_fields, with_field_flags
from specdec.commands.inputs.option_values import output_file
from specdec.commands.views import tables
from specdec.commands.views.failures import EXIT_FAILURE
from specdec.service.texts import read_text
from specdec.v1 import coordinator_pb2 as api

_MOST_PER_CALL = 1024
_OUTPUT = "Output"
_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "max_tokens",
    "ignore_eos",
    "verify_mode",
    "rejection_sample_method",
    "max_draft_tokens",
    "drafters",
)


@with_field_flags(*_FIELDS)
def debug(
    prompt: options.PromptArgument = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.PromptTokenIds = None,
    message: options.Messages = None,
    request_file: Annotated[
        Path | None,
        typer.Option(
            "--request",
            help="File with a request: GenerateRequest in protobuf's JSON, or a file that --json wrote. Flags change "
            "its fields.",
            dir_okay=False,
            exists=True,
            rich_help_panel="Prompt",
        ),
    ] = None,
    *,
    prediction_file: options.PredictionFile = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps to show. (default: all)", min=1, rich_help_panel=_OUTPUT)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page with the tree of every step.",
            dir_okay=False,
            rich_help_panel=_OUTPUT,
            callback=output_file,
        ),
    ] = None,
    as_json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write request and steps to a file that --request takes.",
            dir_okay=False,
            rich_help_panel=_OUTPUT,
            callback=output_file,
        ),
    ] = None,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout_s: connection.TimeoutS = None,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
    **fields: Any,
) -> None:
    """Show a request step by step.

    For each step of the target it shows the proposed tokens, which of them were verified, accepted or rejected and why,
    and the times. The output is the same as without this command. An API key is read from SPECDEC_API_KEY.
    """
    request = api.GenerateRequest() if request_file is None else _recorded(request_file)
    given = prompt is not None or prompt_file or token_ids or message
    if request_file is None or given:
        request.ClearField("input")
        source = options.PromptOptions(
            argument=prompt, file=prompt_file, token_ids=token_ids, messages=tuple(message or ())
        )
        options.set_prompt(request, source)
    set_fields(request, fields)
    options.set_prediction(request, prediction_file)
    settings = connection.client_settings(timeout_s, tls, tls_ca, tls_key, tls_cert)
    notes = Console(stderr=True, highlight=False)
    with reported_errors(notes, address):
        completion, explained = asyncio.run(run(address, settings, request))
    _show(completion, explained, steps)
    if not explained.steps:
        notes.print("The server reports no steps: its version is too old.", style="yellow")
        raise typer.Exit(EXIT_FAILURE)
    if completion.started is not None:
        request.sampling.seed = completion.started.seed
    try:
        if html is not None:
            html.write_text(page_of(explained, title="specdec debug", facts=_facts(completion, explained)), "utf-8")
        if as_json is not None:
            as_json.write_text(json.dumps(_record(request, explained), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}") from error


async def run(address: str, settings: ClientSettings, request: api.GenerateRequest) -> tuple[Completion, Explained]:
    """Send the request, asking for its steps, and explain its first choice.

    Raises the typed errors of `specdec.wire.errors`.
    """
    asked = api.GenerateRequest()
    asked.CopyFrom(request)
    asked.with_steps = True
    if not asked.sampling.HasField("logprobs"):
        asked.sampling.logprobs = 0
    async with Client(address, settings) as client:
        completion = await client.complete(asked)
        choice = completion.choices[0]
        texts = await _texts(client, sorted(token_ids_of(choice)))
    return completion, explain(choice, texts)


async def _texts(client: Client, token_ids: list[int]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for first in range(0, len(token_ids), _MOST_PER_CALL):
        part = token_ids[first : first + _MOST_PER_CALL]
        answer = await client.call("Detokenize", api.DetokenizeRequest(token_ids=part, with_tokens=True))
        texts |= {token: text.decode("utf-8", "replace") for token, text in zip(part, answer.tokens, strict=False)}
    return texts


def _recorded(file: Path) -> api.GenerateRequest:
    """Read a request from a file. Raises typer.BadParameter."""
    try:
        content = json.loads(read_text(file))
        body = content.get("request", content) if isinstance(content, dict) else content
        request = json_format.ParseDict(body, api.GenerateRequest())
    except (OSError, ValueError, json_format.ParseError) as error:
        raise typer.BadParameter(f"{file} holds no request: {error}", param_hint="--request") from error
    request.ClearField("request_id")  # an id may run once only
    request.ClearField("resume")
    return request


def _record(request: api.GenerateRequest, explained: Explained) -> dict[str, Any]:
    body = json_format.MessageToDict(request, preserving_proto_field_name=True)
    return {"request": body, **explained.as_facts(), "by_drafter": explained.by_drafter, "lost_ms": explained.lost}


def _facts(completion: Completion, explained: Explained) -> dict[str, str]:
    stats = completion.require_finished().stats
    started = completion.started
    facts = {} if started is None else {"target": started.model.name, "seed": str(started.seed)}
    facts["output tokens"] = str(completion.num_tokens)
    facts["target steps"] = f"{stats.num_steps}, of which {stats.num_verify_steps} verified a proposal"
    if stats.num_proposed:
        facts["draft tokens"] = f"{stats.num_accepted} of {stats.num_proposed} verified ones accepted"
    for drafter in stats.drafters:
        facts[drafter.name] = (
            f"{drafter.num_proposed} proposed, {drafter.num_verified} verified, {drafter.num_accepted} accepted, "
            f"{drafter.cost_ms:.1f} ms"
        )
    return facts | {name: f"{ms:.1f} ms" for name, ms in explained.lost.items()}


def _show(completion: Completion, explained: Explained, most: int | None) -> None:
    output = Console(highlight=False)
    output.print(debug_view.legend())
    for view in debug_view.steps_view(explained, most):
        output.print(view)
    if explained.by_drafter:
        costs_ms = {record.name: record.cost_ms for record in completion.require_finished().stats.drafters}
        output.print(debug_view.drafters_table(explained, costs_ms))
    if explained.steps:
        output.print(debug_view.losses_table(explained))
    output.print(tables.statistics_table(completion))
