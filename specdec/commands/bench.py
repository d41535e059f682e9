"""`specdec bench`: measure a deployment as its clients see it, with and without speculation."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

import specdec
from specdec.client import Client, ClientSettings
from specdec.commands import connection
from specdec.commands.errors import reported_errors
from specdec.commands.inputs.option_values import (
    MOST_TOKENS,
    positive_numbers,
    prompts_from,
    report_folder,
    whole_numbers,
)
from specdec.commands.measuring.breakdown import breakdown_of, breakdown_plots, breakdown_tables
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.prompts import Prompts, prompts_for
from specdec.commands.measuring.report import Report, machine
from specdec.commands.measuring.requests import Sampling
from specdec.commands.measuring.served import Load, LoadPlan, LoadRun, measure, warm_up
from specdec.commands.measuring.summary import plots_of, rows_of, tables_of
from specdec.commands.up.command import stop_on_signals
from specdec.commands.views.failures import EXIT_FAILURE, EXIT_INTERRUPTED
from specdec.commands.views.tables import harmless, parameters
from specdec.v1 import coordinator_pb2
from specdec.wire.errors import SpecdecError

_LOAD, _REQUESTS, _OUTPUT = "Load", "Requests", "Output"
_LOG_WIDTH = 200
"""Characters per line of tables that go to a file."""
_MOST_REQUESTS = 100_000
"""Requests of a run; tokens and times of each are kept in memory until the end."""
NAME = "specdec-bench"
"""Name of the report's files."""


def bench(
    concurrency: Annotated[
        str | None,
        typer.Option(help="Requests at once: 1,8. (default: 1,8, without --rate)", rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second at random times (Poisson): 2,4.", rich_help_panel=_LOAD)
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds for which requests arrive at each rate.", min=0.1, rich_help_panel=_LOAD)
    ] = 20.0,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of a run with --concurrency. (default: one per prompt, at least four times --concurrency)",
            min=1,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs with and runs without speculation; they alternate.", min=1)] = 3,
    speculation: Annotated[
        Literal["on", "off", "both"], typer.Option(help="Measure with speculation, without it, or both and the ratio.")
    ] = "both",
    breakdown: Annotated[
        bool,
        typer.Option(
            help="Add an untimed run of each load for acceptance by position, by drafter and by kind of prompt."
        ),
    ] = True,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: .jsonl or .json with texts, or with objects that have prompt, text or token_ids, "
            "and optionally kind; any other file has one text per line. (default: the shipped prompts for the shipped "
            "pair, else a few in English)",
            dir_okay=False,
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of each answer.", min=1, max=MOST_TOKENS, rich_help_panel=_REQUESTS)
    ] = 96,
    stop_at_eos: Annotated[
        bool,
        typer.Option("--stop-at-eos", help="Let end-of-sequence tokens end answers.", rich_help_panel=_REQUESTS),
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy decoding.", min=0, max=100, rich_help_panel=_REQUESTS)
    ] = 0.0,
    verify_mode: Annotated[
        Literal["coupled", "rejection"] | None,
        typer.Option(help="How the target verifies. (default: the server's)", rich_help_panel=_REQUESTS),
    ] = None,
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Most draft tokens per step.", min=1, max=MOST_TOKENS, rich_help_panel=_REQUESTS)
    ] = None,
    model: Annotated[str, typer.Option(help="The model's name; empty: the served one.")] = "",
    report: Annotated[
        Path | None,
        typer.Option(
            help="Folder for JSON, a page and plots.", file_okay=False, rich_help_panel=_OUTPUT, callback=report_folder
        ),
    ] = None,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout_s: connection.TimeoutS = 300.0,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
) -> None:
    """Measure a deployment: speed, times and acceptance by load, with and without speculation.

    Tables go to standard output, everything else to standard error. Failed requests are counted by reason. Ctrl-C
    reports the runs until then. An API key is read from SPECDEC_API_KEY; a quota falsifies the figures.
    """
    if concurrency is not None and rate is not None:
        raise typer.BadParameter("--concurrency and --rate exclude each other")
    loads = _loads(concurrency, rate, requests, seconds)
    own = None if prompts is None else prompts_from(prompts)
    settings = connection.client_settings(timeout_s, tls, tls_ca, tls_key, tls_cert)
    sampling = Sampling(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_at_eos=stop_at_eos,
        max_draft_tokens=max_draft_tokens,
        verify_mode=verify_mode,
        model=model,
    )
    wishes = LoadPlan(
        prompts=() if own is None else own.prompts,
        sampling=sampling,
        loads=loads,
        speculation={"on": (True,), "off": (False,), "both": (True, False)}[speculation],
        repeats=repeats,
        num_requests=requests,
        seconds=seconds,
        tells_steps=breakdown,
    )
    notes = Console(stderr=True, highlight=False)
    with reported_errors(notes, address), stop_on_signals():
        run(address, settings, wishes, own, report, notes)


def _loads(concurrency: str | None, rate: str | None, requests: int | None, seconds: float) -> list[Load]:
    """Raises typer.BadParameter, also for more requests than are kept, or fewer than --concurrency."""
    if rate is not None:
        rates = positive_numbers(rate, "--rate")
        if max(rates) * seconds > _MOST_REQUESTS:
            words = f"{max(rates):g} requests per second for {seconds:g} s are more than {_MOST_REQUESTS} requests"
            raise typer.BadParameter(words, param_hint="--rate")
        return [Load(rate=value) for value in rates]
    places = whole_numbers("1,8" if concurrency is None else concurrency, "--concurrency")
    if requests is not None and requests < max(places):
        raise typer.BadParameter(f"{requests} is below --concurrency {max(places)}", param_hint="--requests")
    if max(4 * max(places), requests or 0) > _MOST_REQUESTS:
        raise typer.BadParameter(f"a run would have more than {_MOST_REQUESTS} requests", param_hint="--concurrency")
    return [Load(concurrency=value) for value in places]


def run(
    address: str, settings: ClientSettings, wishes: LoadPlan, own: Prompts | None, folder: Path | None, notes: Console
) -> None:
    """Measure and report; an interrupted run reports its finished part.

    Raises the typed errors of `specdec.wire.errors`, and typer.Exit when it was interrupted or every request failed.
    """
    with Progress(notes) as progress:
        progress.tell(f"asking {address}")
        info = asyncio.run(_ask(address, settings))
        used = own or prompts_for(info.target.tokenizer_digest)
        wishes = dataclasses.replace(wishes, prompts=used.prompts, speculation=_possible(wishes, info, notes))
        notes.print(f"prompts: {used.source}", markup=False, soft_wrap=True)
        passes: list[LoadRun] = []
        stopped_by: BaseException | None = None
        try:
            asyncio.run(_measure(address, settings, wishes, passes, progress))
        except (KeyboardInterrupt, SpecdecError) as error:
            stopped_by = error
    rows = [row for row in rows_of(passes) if row["num_requests"]]
    if rows:
        facts = _facts(address, info, used, wishes) | {"interrupted": stopped_by is not None}
        found = Report(pair=describe_pair(info), facts=facts, console=_output())
        title = f"temperature {wishes.sampling.temperature:g}, {wishes.sampling.max_tokens} tokens"
        note = f"{found.pair}; {title}"
        found.add("bench", rows, tables_of(rows, title), plots_of(rows, note))
        if wishes.tells_steps and any(row["speculation"] for row in rows):
            parts = breakdown_of(passes, used.kinds)
            found.add("breakdown", parts, breakdown_tables(parts, title), breakdown_plots(parts, note))
        if folder is not None:
            save(found, folder, NAME, notes)
    if isinstance(stopped_by, KeyboardInterrupt):
        notes.print("Interrupted" + (": the tables show the runs until then." if rows else "."), style="yellow")
        raise typer.Exit(EXIT_INTERRUPTED)
    if stopped_by is not None:
        raise stopped_by
    if all(row["num_failed"] == row["num_requests"] for row in rows):
        notes.print("error: every request failed", style="bold red")
        raise typer.Exit(EXIT_FAILURE)


def _output() -> Console:
    output = Console(highlight=False)
    return output if output.is_terminal else Console(width=_LOG_WIDTH, highlight=False)


async def _ask(address: str, settings: ClientSettings) -> coordinator_pb2.GetModelInfoResponse:
    async with Client(address, settings) as client:
        return await client.model_info()


async def _measure(
    address: str, settings: ClientSettings, wishes: LoadPlan, passes: list[LoadRun], progress: Progress
) -> None:
    progress.tell("warming up")
    await warm_up(address, settings, wishes)
    await measure(address, settings, wishes, passes, progress.tell)


def _possible(wishes: LoadPlan, info: coordinator_pb2.GetModelInfoResponse, notes: Console) -> Sequence[bool]:
    """The wanted kinds of runs, without those that the deployment cannot do."""
    if info.HasField("draft") or info.drafters or True not in wishes.speculation:
        return wishes.speculation
    notes.print("No draft is connected: only plain decoding is measured.", style="yellow")
    return (False,)


def describe_pair(info: coordinator_pb2.GetModelInfoResponse) -> str:
    """Served target and draft in one line."""
    parts = [("target", info.target), *([("draft", info.draft)] if info.HasField("draft") else [])]
    words = (f"{role} {one.name} ({parameters(one)} parameters, {one.dtype} on {one.device})" for role, one in parts)
    return harmless(", ".join(words))


def _facts(
    address: str, info: coordinator_pb2.GetModelInfoResponse, used: Prompts, wishes: LoadPlan
) -> dict[str, object]:
    sampling = wishes.sampling
    return {
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "address": address,
        "specdec": specdec.__version__,
        "target_numerics": info.target.numerics_id,
        "prompts": used.source,
        "loads": [str(load) for load in wishes.loads],
        "repeats": wishes.repeats,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "stop_at_eos": sampling.stop_at_eos,
        "verify_mode": sampling.verify_mode or "the deployment's",
        "max_draft_tokens": sampling.max_draft_tokens or "the deployment's",
        "client_machine": machine(sorted(os.sched_getaffinity(0))),
    }


def save(found: Report, folder: Path, name: str, notes: Console) -> None:
    """Write a report and say where it is. Raises typer.BadParameter where it cannot be written."""
    try:
        page = found.save(folder, name)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}", param_hint="--report") from error
    notes.print(f"report: {page}, with JSON and plots in the same folder", markup=False, soft_wrap=True)
