"""`specdec doctor`: the checklist of a running deployment or of a settings file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from specdec.client import ClientSettings
from specdec.commands import connection
from specdec.commands.doctor.behaviour import check_behaviour
from specdec.commands.doctor.findings import Finding, FindingOutcome
from specdec.commands.doctor.replicas import check_drafters, check_replicas
from specdec.commands.doctor.settings_file import check_settings
from specdec.commands.doctor.surroundings import check_audit, check_draft_death, check_prometheus, check_tenants
from specdec.commands.errors import reported_errors
from specdec.commands.inputs.config_file import by_parameter, read_config
from specdec.commands.inputs.option_values import MOST_TOKENS, prompts_from
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.prompts import Prompts, prompts_for
from specdec.commands.measuring.requests import new_tenant
from specdec.commands.up.drafters import expanded
from specdec.commands.up.plan import shipped_model
from specdec.commands.views.failures import EXIT_FAILURE
from specdec.commands.views.tables import harmless
from specdec.telemetry import setup_logging

_STYLES = {FindingOutcome.PASS: "green", FindingOutcome.WARN: "yellow", FindingOutcome.FAIL: "bold red"}
_ASKED, _AROUND = "Requests", "Surroundings"


def doctor(
    context: typer.Context,
    settings_file: Annotated[
        Path | None,
        typer.Option(
            "--settings",
            help="Check a file for `specdec up --config` instead of a running deployment.",
            dir_okay=False,
            exists=True,
        ),
    ] = None,
    try_heads: Annotated[
        bool,
        typer.Option(
            "--try-heads",
            help="With --settings: load the target and compare its heads' acceptance with that at neighbouring layer "
            "ids; takes up to a minute for a small model.",
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts as your users send them, as for `specdec bench`.",
            dir_okay=False,
            rich_help_panel=_ASKED,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1, rich_help_panel=_ASKED)] = 4,
    temperature: Annotated[
        float, typer.Option(help="Temperature of your users' requests.", min=0, max=100, rich_help_panel=_ASKED)
    ] = 1.0,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of each answer.", min=1, max=MOST_TOKENS, rich_help_panel=_ASKED)
    ] = 64,
    concurrency: Annotated[
        int, typer.Option(help="Requests at once at your highest load.", min=1, rich_help_panel=_ASKED)
    ] = 8,
    prometheus: Annotated[
        str | None, typer.Option(help="URL of the deployment's Prometheus.", rich_help_panel=_AROUND)
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(help="JSON file of `specdec audit --report`.", dir_okay=False, rich_help_panel=_AROUND),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout_s: connection.TimeoutS = 300.0,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
) -> None:
    """Check a deployment: each line is pass, warn or fail, with measurement and remedy.

    The command sends requests with and without speculation for about ten seconds. The exit code is 1 if a line fails.
    An API key is read from SPECDEC_API_KEY.
    """
    notes = Console(stderr=True, highlight=False)
    own = None if prompts is None else prompts_from(prompts)
    if settings_file is not None:
        section = _section(context, settings_file)
        with reported_errors(notes), Progress(notes) as progress:
            if try_heads:
                setup_logging("doctor", "warning", "console")
                progress.part("doctor")
                progress.tell("loading the target and trying its heads")
            target = str(section.get("target") or shipped_model("target"))
            draft = str(section.get("draft") or shipped_model("draft"))
            asked_of = None if own is None else own.prompts[:num_prompts]
            found = list(check_settings(section, target, draft, tries_heads=try_heads, prompts=asked_of))
    elif try_heads:
        raise typer.BadParameter("needs --settings: a running target is not loaded again", param_hint="--try-heads")
    else:
        settings = connection.client_settings(timeout_s, tls, tls_ca, tls_key, tls_cert)
        with reported_errors(notes, address), Progress(notes) as progress:
            progress.part("doctor")
            asked = _Asked(own, num_prompts, temperature, max_tokens, concurrency, prometheus, audit)
            found = asyncio.run(examine(address, settings, asked, progress))
    _show(found, as_json=as_json)
    if any(one.outcome is FindingOutcome.FAIL for one in found):
        raise typer.Exit(EXIT_FAILURE)


def _section(context: typer.Context, file: Path) -> dict[str, Any]:
    """The section `up` of a file, by that command's parameters. Raises typer.BadParameter."""
    group: Any = context.find_root().command
    section = read_config(file, "--settings").get("up", {})
    return expanded(by_parameter(group.get_command(context, "up"), file, "up", section, "--settings"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    own: Prompts | None
    num_prompts: int
    temperature: float
    max_tokens: int
    concurrency: int
    prometheus: str | None
    audit: Path | None


async def examine(address: str, settings: ClientSettings, asked: _Asked, progress: Progress) -> list[Finding]:
    """All lines about a running deployment. Raises the typed errors of `specdec.wire.errors`."""
    async with new_tenant(address, settings) as client:
        info, status = await client.model_info(), await client.status()
        found = [*check_replicas(info, status), *check_drafters(info, asked.temperature)]
        used = asked.own or prompts_for(info.target.tokenizer_digest)
        lines = check_behaviour(
            functools.partial(new_tenant, address, settings),
            used.prompts[: asked.num_prompts],
            temperature=asked.temperature,
            max_tokens=asked.max_tokens,
            concurrency=asked.concurrency,
        )
        async with contextlib.aclosing(lines):
            async for line in lines:
                progress.tell(line.what)
                found.append(line)
        found.append(check_audit(asked.audit, info))
        found += await asyncio.to_thread(lambda: list(check_prometheus(asked.prometheus)))
        found.append(check_draft_death())
        found.append(check_tenants(info, settings.api_key is not None))
    return found


def _show(found: Sequence[Finding], *, as_json: bool) -> None:
    output = Console(highlight=False)
    if as_json:
        output.out(json.dumps([dataclasses.asdict(one) for one in found], indent=1), highlight=False)
        return
    for one in found:
        line = Text(f"{one.outcome:<5}", style=_STYLES[one.outcome])
        line.append(harmless(one.what), style="bold" if one.outcome is not FindingOutcome.PASS else "default")
        line.append(f": {harmless(one.measured)}", style="default not bold")
        output.print(line, soft_wrap=True)
        if one.do:
            output.print(Text(f"     do: {harmless(one.do)}", style="dim"), soft_wrap=True)
    counts = Counter(one.outcome for one in found)
    output.print(", ".join(f"{counts[outcome]} {outcome}" for outcome in FindingOutcome), style="bold")
