"""`specdec audit`: compares a running service with its checkpoint, in greedy decoding and in sampling."""

from __future__ import annotations

import asyncio
import datetime
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

import specdec
from specdec.client import Client, ClientSettings
from specdec.commands import connection
from specdec.commands.errors import ClusterFailed, reported_errors
from specdec.commands.inputs.option_values import MOST_TOKENS, prompts_from, report_folder
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.prompts import Prompts, prompts_for
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.tables import Table
from specdec.commands.up.plan import shipped_model
from specdec.commands.views.failures import EXIT_FAILURE
from specdec.engine.checkpoints.files import find_model_files, weights_digest
from specdec.engine.errors import ModelLoadError
from specdec.v1 import coordinator_pb2 as api

if TYPE_CHECKING:  # torch takes seconds
    from specdec.commands.audit.audit import AuditPlan, AuditResult
    from specdec.commands.audit.reference import Reference

NAME = "specdec-audit"
"""Name of the report's files."""
_LOG_WIDTH = 200
"""Characters per line of tables that go to a file."""
_QUESTIONS, _SERVICE = "Requests", "Audited service"


def audit(
    target: Annotated[
        str | None,
        typer.Option(
            help="The served checkpoint: folder or hub id. (default: the shipped target)",
            rich_help_panel=_SERVICE,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Audit another server with OpenAI's completions, such as http://host:8000/v1, instead of a "
            "coordinator. It must return token ids.",
            rich_help_panel=_SERVICE,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="The model's name at the service; empty: the served one.", rich_help_panel=_SERVICE)
    ] = "",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(
            help="Data type of the service. (default: as it reports; with --against float32)",
            rich_help_panel=_SERVICE,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, as for `specdec bench`.", dir_okay=False, rich_help_panel=_QUESTIONS),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1, rich_help_panel=_QUESTIONS)] = 4,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of each greedy answer.", min=1, max=MOST_TOKENS, rich_help_panel=_QUESTIONS)
    ] = 64,
    samples: Annotated[
        int, typer.Option(help="Sampled answers per prompt; 0: none.", min=0, rich_help_panel=_QUESTIONS)
    ] = 256,
    sampled_tokens: Annotated[
        int, typer.Option(help="Tokens of each sampled answer.", min=1, max=64, rich_help_panel=_QUESTIONS)
    ] = 8,
    temperature: Annotated[
        float, typer.Option(help="Temperature of sampled answers.", min=0.01, max=100, rich_help_panel=_QUESTIONS)
    ] = 1.0,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1, rich_help_panel=_QUESTIONS)] = 8,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference of two logits that is a near-tie. (default: by dtype, 0.0001 for float32)", min=0
        ),
    ] = None,
    false_alarm_rate: Annotated[
        float, typer.Option(help="Probability that a correct service fails the tests of sampling.", min=1e-12, max=0.1)
    ] = 1e-4,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for the report, as JSON and Markdown.", file_okay=False, callback=report_folder),
    ] = None,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout_s: connection.TimeoutS = 300.0,
    tls: connection.Tls = False,
    tls_ca: connection.TlsCa = None,
    tls_key: connection.TlsKey = None,
    tls_cert: connection.TlsCert = None,
) -> None:
    """Compare a running service with its checkpoint, which transformers runs on this machine's CPU.

    In greedy answers every token must be the model's best one, or a near-tie. Sampled answers are tested against the
    model's distribution by chi-square. The exit code is 1 if the service differs from its model. The command needs
    torch, and memory for the model in float32. An API key is read from SPECDEC_API_KEY.
    """
    # Before a checkpoint is fetched in vain: they import torch.
    from specdec.commands.audit.audit import AuditPlan
    from specdec.commands.audit.services import AuditImpossible

    own = None if prompts is None else prompts_from(prompts)
    settings = connection.client_settings(timeout_s, tls, tls_ca, tls_key, tls_cert)
    notes = Console(stderr=True, highlight=False)
    with reported_errors(notes, "" if against else address), Progress(notes) as progress:
        progress.part("audit")
        progress.tell("loading the model")
        folder = _folder(target or shipped_model("target"))
        wishes = AuditPlan(
            prompts=(),
            greedy_tokens=max_tokens,
            temperature=temperature,
            num_samples=samples,
            sampled_tokens=sampled_tokens,
            concurrency=concurrency,
            false_alarm_rate=false_alarm_rate,
        )
        one = _Audit(folder, own, num_prompts, dtype, tolerance, model, progress)
        try:
            if against is None:
                finding, used = asyncio.run(one.of_coordinator(address, settings, wishes))
            else:
                finding, used = asyncio.run(one.of_server(against, settings, wishes))
        except AuditImpossible as error:
            raise ClusterFailed(str(error)) from error
    _show(finding, wishes, used, folder, report, notes)
    if not finding.is_lossless:
        raise typer.Exit(EXIT_FAILURE)


class _Audit:
    """One audit, of either kind of service."""

    def __init__(
        self,
        folder: Path,
        own: Prompts | None,
        num_prompts: int,
        dtype: str | None,
        tolerance: float | None,
        model: str,
        progress: Progress,
    ) -> None:
        self._folder, self._own, self._num_prompts = folder, own, num_prompts
        self._dtype, self._tolerance, self._model = dtype, tolerance, model
        self._progress = progress

    async def of_coordinator(
        self, address: str, settings: ClientSettings, wishes: AuditPlan
    ) -> tuple[AuditResult, str]:
        """Audit a coordinator. Raises ClusterFailed if it serves another checkpoint."""
        from specdec.commands.audit.audit import audit as run_audit
        from specdec.commands.audit.services import OwnService, is_reproducible

        async with Client(address, settings) as client:
            info = await client.model_info()
            self._check_is_served(info)
            reference = self._reference(self._dtype or info.target.dtype, info.target.numerics_id)
            wishes, used = self._questions(reference, self._dtype or info.target.dtype, wishes)
            wishes = replace(wishes, repeats_plainly=is_reproducible(info))
            return await run_audit(OwnService(client, self._model), reference, wishes, self._progress.tell), used

    async def of_server(self, url: str, settings: ClientSettings, wishes: AuditPlan) -> tuple[AuditResult, str]:
        """Audit another OpenAI-compatible server."""
        from specdec.commands.audit.audit import audit as run_audit
        from specdec.commands.audit.services import OpenAIServer

        dtype = self._dtype or "float32"
        server = OpenAIServer(
            url, self._model or self._folder.name, api_key=settings.api_key, timeout_s=settings.timeout_s or 300.0
        )
        reference = self._reference(dtype, "")
        wishes, used = self._questions(reference, dtype, wishes)
        return await run_audit(server, reference, wishes, self._progress.tell), used

    def _check_is_served(self, info: api.GetModelInfoResponse) -> None:
        served = info.target.weights_digest
        if not served.startswith("random-") and served != weights_digest(self._folder):
            raise ClusterFailed(f"the served model {info.target.name} has other weights than {self._folder} (--target)")

    def _reference(self, dtype: str, numerics_id: str) -> Reference:
        from specdec.commands.audit.reference import Reference

        quantized = next((kind for kind in ("int8", "int4") if f"/{kind}-weights/" in numerics_id), "none")
        try:
            return Reference(self._folder, dtype=dtype, quantization=quantized)  # type: ignore[arg-type]
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise ClusterFailed(f"transformers cannot load {self._folder}: {error}") from error

    def _questions(self, reference: Reference, dtype: str, wishes: AuditPlan) -> tuple[AuditPlan, str]:
        from specdec.commands.audit.greedy import NEAR_TIES

        used = self._own or prompts_for(reference.tokenizer_digest)
        token_ids: list[list[int]] = []
        for prompt in used.prompts[: self._num_prompts]:
            if not isinstance(prompt, str):
                token_ids.append(list(prompt))
            elif reference.tokenizer is None:
                raise ClusterFailed(f"{self._folder} has no tokenizer: give prompts as token ids (--prompts)")
            else:
                token_ids.append(reference.tokenizer.encode(prompt).ids)
        tolerance = NEAR_TIES[dtype] if self._tolerance is None else self._tolerance
        return replace(wishes, prompts=token_ids, tolerance=tolerance), used.source


def _folder(model: str) -> Path:
    try:
        return find_model_files(model, None)[0]
    except ModelLoadError as error:
        raise ClusterFailed(str(error)) from error


def _show(
    finding: AuditResult, wishes: AuditPlan, used: str, folder: Path, report: Path | None, notes: Console
) -> None:
    output = Console(highlight=False)
    if not output.is_terminal:
        output = Console(width=_LOG_WIDTH, highlight=False)
    facts: dict[str, object] = {
        "audited": finding.service,
        "checkpoint": folder.name,
        "weights_digest": weights_digest(folder),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "specdec": specdec.__version__,
        "prompts": used,
        "num_prompts": finding.num_prompts,
        "temperature": wishes.temperature,
        "false_alarm_rate": wishes.false_alarm_rate,
        "verdict": _verdict(finding),
    }
    page = Report(pair=f"Audit of {finding.service}", facts=facts, console=output)
    page.add("audit", finding.as_facts(), [_greedy_table(finding), *_sampling_tables(finding, wishes)])
    output.print(f"\n{escape(_verdict(finding))}", style="bold green" if finding.is_lossless else "bold red")
    if report is not None:
        try:
            notes.print(f"report: {page.save(report, NAME)}", markup=False, soft_wrap=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {report}: {os.strerror(error.errno or 0)}") from error


def _verdict(finding: AuditResult) -> str:
    if finding.is_lossless:
        drafts = {
            True: f"{finding.num_accepted} of {finding.num_drafted} draft tokens were accepted during the audit",
            False: "no draft token was accepted during the audit, so it says nothing about speculation",
            None: "the service does not report whether it speculated",
        }[finding.speculated]
        return f"The service agrees with its model; {drafts}."
    reasons = []
    if finding.greedy.faults:
        reasons.append(f"{len(finding.greedy.faults)} greedy tokens are not the model's, beyond rounding")
    if finding.failed_fits:
        reasons.append(f"{len(finding.failed_fits)} tests of sampling fail")
    if finding.num_changed:
        reasons.append(f"{finding.num_changed} sampled answers change with speculation")
    return f"The service differs from its model: {'; '.join(reasons)}."


def _greedy_table(finding: AuditResult) -> Table:
    greedy = finding.greedy
    table = Table("Greedy answers", ["tokens", "the model's best", "near-ties", "largest gap of these", "wrong"])
    gaps = [difference.gap for difference in greedy.near_ties]
    table.add(
        greedy.num_tokens,
        greedy.num_equal,
        len(greedy.near_ties),
        f"{max(gaps):.1e}" if gaps else "-",
        len(greedy.faults),
    )
    table.notes += [
        f"Prompt {difference.prompt + 1}, token {difference.position + 1}: {difference.token_id} in place of "
        f"{difference.best_token_id}, whose logit is {difference.gap:.3g} higher."
        for difference in greedy.faults[:5]
    ]
    table.notes.append(f"A near-tie is a gap below {greedy.tolerance:g} between two logits of the model.")
    return table


def _sampling_tables(finding: AuditResult, wishes: AuditPlan) -> list[Table]:
    if not wishes.num_samples:
        return []
    table = Table("Sampled answers", ["test", "samples", "cells", "chi-square", "p-value", "verdict"])
    for fit in finding.fits:
        verdict = "fails" if fit.p_value < finding.threshold else "passes"
        table.add(fit.what, fit.num_samples, fit.num_cells, f"{fit.chi_square:.1f}", f"{fit.p_value:.2g}", verdict)
    table.notes.append(
        f"A test fails below {finding.threshold:.1e}: a correct service fails any test with probability "
        f"{wishes.false_alarm_rate:g} at most."
    )
    if finding.num_repeated:
        table.notes.append(
            f"{finding.num_repeated} answers were repeated without speculation: {finding.num_changed} differ."
        )
    return [table]
