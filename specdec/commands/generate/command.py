"""`specdec generate`: stream a completion, show its tokens' origins, compare with plain decoding."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec.client import Client, ClientSettings, CompletedChoice, Completion, generate_resuming
from specdec.commands import connection
from specdec.commands import request_options as options
from specdec.commands.errors import reported_errors
from specdec.commands.field_flags import set_fields, with_field_flags
from specdec.commands.generate.stream_view import StreamView
from specdec.commands.views import tables
from specdec.commands.views.origins import legend
from specdec.commands.views.tables import cell
from specdec.v1 import common_pb2, coordinator_pb2

_OUTPUT = "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """Output beside the text."""

    show_origin: bool = False
    compare: bool = False
    as_json: bool = False
    statistics: bool = True


@with_field_flags()
def generate(
    prompt: options.PromptArgument = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.PromptTokenIds = None,
    message: options.Messages = None,
    *,
    json_schema_file: options.JsonSchemaFile = None,
    regex: options.Regex = None,
    grammar_file: options.GrammarFile = None,
    choice: options.Choices = None,
    prediction_file: options.PredictionFile = None,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Colour tokens by their origin.", rich_help_panel=_OUTPUT)
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Repeat the request without speculation, and compare.", rich_help_panel=_OUTPUT),
    ] = False,
    statistics: Annotated[
        bool, typer.Option(help="End with a table of the statistics.", rich_help_panel=_OUTPUT)
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print each chunk as a line of JSON.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout_s: connection.TimeoutS = None,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
    **fields: Any,
) -> None:
    """Complete a prompt and stream the text.

    Text goes to standard output, everything else to standard error. An API key is read from SPECDEC_API_KEY.
    """
    if as_json and compare:
        raise typer.BadParameter("--json and --compare exclude each other")
    request = coordinator_pb2.GenerateRequest()
    source = options.PromptOptions(
        argument=prompt, file=prompt_file, token_ids=token_ids, messages=tuple(message or ())
    )
    options.set_prompt(request, source)
    set_fields(request, fields)
    options.set_constraint(
        request.sampling, json_schema_file=json_schema_file, regex=regex, grammar_file=grammar_file, choices=choice
    )
    options.set_prediction(request, prediction_file)
    settings = connection.client_settings(timeout_s, tls, tls_ca, tls_key, tls_cert)
    display = Display(show_origin=show_origin, compare=compare, as_json=as_json, statistics=statistics)
    with reported_errors(Console(stderr=True), address):
        asyncio.run(run_request(address, settings, request, display))


async def run_request(
    address: str, settings: ClientSettings, request: coordinator_pb2.GenerateRequest, display: Display
) -> None:
    """Send the request and show the answer. Raises the typed errors of `specdec.wire.errors`."""
    output, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    async with Client(address, settings) as client:
        if display.show_origin and not display.as_json:
            notes.print(legend())
        completion = Completion()
        with StreamView(output, notes, show_origin=display.show_origin, as_json=display.as_json) as view:
            async for chunk in generate_resuming(client, request):
                completion.add(chunk)
                view.show(chunk)
        completion.require_finished()
        if display.as_json:
            return
        if completion.prompt_logprobs is not None:
            notes.print(prompt_logprobs_table(completion.prompt_logprobs))
        if request.sampling.HasField("logprobs"):
            for choice in completion.choices.values():
                notes.print(logprobs_table(choice))
        if display.statistics:
            notes.print(tables.statistics_table(completion))
        if display.compare:
            await _compare(client, request, completion, display, notes)


async def _compare(
    client: Client,
    request: coordinator_pb2.GenerateRequest,
    speculative: Completion,
    display: Display,
    notes: Console,
) -> None:
    """Run the same request, with the same seed, without speculation."""
    plain_request = coordinator_pb2.GenerateRequest()
    plain_request.CopyFrom(request)
    plain_request.request_id = ""
    plain_request.speculation.enabled = False
    if speculative.started is not None:
        plain_request.sampling.seed = speculative.started.seed
    plain = Completion()
    # The hidden view makes this client do the same work in both runs.
    hidden = Console(file=io.StringIO(), force_terminal=True, highlight=False)
    with (
        notes.status("the same request without speculation"),
        StreamView(hidden, hidden, show_origin=display.show_origin) as view,
    ):
        async for chunk in generate_resuming(client, plain_request):
            plain.add(chunk)
            view.show(chunk)
    notes.print(tables.comparison_table(speculative, plain))
    if _promises_equality(request, (await client.model_info()).default_verify_mode):
        notes.print(tables.equality_line(speculative, plain))
    else:
        notes.print("Rejection verification keeps the distribution, not the tokens.", style="dim")


def _promises_equality(request: coordinator_pb2.GenerateRequest, default_mode: common_pb2.VerifyMode.ValueType) -> bool:
    mode = request.speculation.verify_mode or default_mode
    greedy = request.sampling.HasField("temperature") and request.sampling.temperature == 0
    return greedy or mode != common_pb2.VERIFY_MODE_REJECTION


def logprobs_table(choice: CompletedChoice) -> Table:
    """Return each token of a choice with its log-probability and its alternatives."""
    table = tables.make_table("Log-probabilities", "token", "id", "logprob", "likeliest")
    for token in choice.tokens:
        table.add_row(cell(repr(token.text)), str(token.id), *_logprob_cells(token.logprobs))
    return table


def prompt_logprobs_table(prompt: coordinator_pb2.PromptLogprobs) -> Table:
    """Return each token of the prompt with its log-probability and its alternatives; the first one has none."""
    table = tables.make_table("Log-probabilities of the prompt", "id", "logprob", "likeliest")
    if prompt.token_ids:
        table.add_row(str(prompt.token_ids[0]), "", "")
    for token_id, logprobs in zip(prompt.token_ids[1:], prompt.positions, strict=False):
        table.add_row(str(token_id), *_logprob_cells(logprobs))
    return table


def _logprob_cells(logprobs: common_pb2.PositionLogprobs) -> tuple[str, str]:
    return f"{logprobs.logprob:.3f}", "  ".join(f"{entry.token_id}: {entry.logprob:.2f}" for entry in logprobs.top)
