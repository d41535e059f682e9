"""`specdec plan`: the cheapest deployment that holds objectives for a load, by simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from specdec.commands.errors import ClusterFailed, reported_errors
from specdec.commands.inputs.option_values import output_file
from specdec.commands.measuring.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.coordinator.tenants.quotas import Allowance
    from specdec.plan.deployment import Question
    from specdec.plan.inputs.traffic import Traffic

_LOG_WIDTH = 200
_ASKED, _BORNE, _ASSUMED = "Requests", "Objectives", "Assumptions"
_DEFAULT_ACCEPTANCE = "0.8,0.78,0.76,0.75"


def plan(
    target: Annotated[Path | None, typer.Option(help="The target's folder or config.json.")] = None,
    draft: Annotated[Path | None, typer.Option(help="The draft's folder or config.json.")] = None,
    devices: Annotated[
        str, typer.Option(help="GPUs to choose from for targets, as NAME or NAME=DOLLARS_PER_HOUR, by commas.")
    ] = "L4,A100,H100",
    draft_devices: Annotated[str, typer.Option(help="The same for drafts. (default: as for targets)")] = "",
    measured: Annotated[
        Path | None,
        typer.Option(
            help="specdec-tune.json of `specdec tune --report`: its step times and acceptance, in place of models. "
            "--devices then names the measured machine, and its price.",
            dir_okay=False,
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.", rich_help_panel=_ASKED)] = None,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Tokens of prompts: 512 (all equal), 128-1024 (uniform), 512~0.8 (log-normal, with the standard "
            "deviation over the mean).",
            rich_help_panel=_ASKED,
        ),
    ] = "512~0.8",
    output_tokens: Annotated[
        str, typer.Option(help="Tokens of outputs, in the same form.", rich_help_panel=_ASKED)
    ] = "256~0.8",
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of gaps: 1 is Poisson, below 1 requests come in bursts.",
            rich_help_panel=_ASKED,
        ),
    ] = 1.0,
    swing: Annotated[
        float,
        typer.Option(help="Part by which --rate rises and falls over a day.", rich_help_panel=_ASKED),
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests in place of the above: Mooncake's JSONL, a dataset or a --save-detailed result of `vllm "
            "bench serve`, or a coordinator's log with --access-log. --rate scales it; without times it is needed.",
            dir_okay=False,
            rich_help_panel=_ASKED,
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="The deployment's file of API keys: quotas and weights of the trace's tenants.",
            dir_okay=False,
            rich_help_panel=_ASKED,
        ),
    ] = None,
    timestamp_unit: Annotated[
        Literal["ms", "s"],
        typer.Option(help="Unit of the trace's field `timestamp`: ms as in Mooncake's.", rich_help_panel=_ASKED),
    ] = "ms",
    keep_gaps: Annotated[
        bool, typer.Option("--keep-gaps", help="Take a trace with a hole in it.", rich_help_panel=_ASKED)
    ] = False,
    ttft_ms: Annotated[
        float, typer.Option(help="Milliseconds to the first token, 99th percentile.", rich_help_panel=_BORNE)
    ] = 1000.0,
    itl_ms: Annotated[
        float, typer.Option(help="Milliseconds between tokens, 99th percentile.", rich_help_panel=_BORNE)
    ] = 100.0,
    survive: Annotated[
        Literal["nothing", "replica", "node", "zone"],
        typer.Option(
            help="Loss under which both must hold; a larger one includes the smaller ones.", rich_help_panel=_BORNE
        ),
    ] = "node",
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Also try the chart's autoscaling for a day, between the fewest targets and those of the plan, which "
            "is for the peak.",
            rich_help_panel=_BORNE,
        ),
    ] = False,
    zones: Annotated[int, typer.Option(help="Zones.", min=1, max=100, rich_help_panel=_BORNE)] = 1,
    acceptance: Annotated[
        str,
        typer.Option(
            help="Share of draft tokens accepted at depth 1, 2, ..., each if those before it were; deeper ones as the "
            "last. With --measured its own is used.",
            rich_help_panel=_ASSUMED,
        ),
    ] = _DEFAULT_ACCEPTANCE,
    temperature: Annotated[
        float, typer.Option(help="Temperature whose measured acceptance is used.", rich_help_panel=_ASSUMED)
    ] = 0.0,
    speculation: Annotated[
        Literal["adaptive", "on", "off"], typer.Option(help="Speculation of the deployment.", rich_help_panel=_ASSUMED)
    ] = "adaptive",
    delay_ms: Annotated[
        float, typer.Option(help="Milliseconds between target and draft, one way.", rich_help_panel=_ASSUMED)
    ] = 0.2,
    loss: Annotated[
        float, typer.Option(help="Share of messages that the network loses.", rich_help_panel=_ASSUMED)
    ] = 0.0,
    seeds: Annotated[int, typer.Option(help="Runs of the result with other seeds.", min=1, max=50)] = 3,
    seed: Annotated[int, typer.Option(help="First seed.", min=0)] = 1,
    target_source: Annotated[str, typer.Option(help="The target's source for the values file: hf://ORG/NAME.")] = "",
    draft_source: Annotated[str, typer.Option(help="The draft's.")] = "",
    out: Annotated[
        Path, typer.Option(help="Values file for the chart; the page goes to NAME.html.", callback=output_file)
    ] = Path("specdec-plan.yaml"),
) -> None:
    """Find the cheapest deployment that holds objectives for a load, by simulation.

    The coordinators' admission and router, and the targets' hold-off, gate and choice of nodes, are the services' own
    code on a simulated clock. Step times come from a roofline or a measurement. All figures are predictions; the page
    lists the assumptions.
    """
    for flag, value, least, most in (
        ("--rate", rate, 1e-3, 1e6),
        ("--burstiness", burstiness, 0.01, 100),
        ("--ttft-ms", ttft_ms, 1e-3, 1e7),
        ("--itl-ms", itl_ms, 1e-3, 1e7),
        ("--delay-ms", delay_ms, 0, 1e4),
        ("--loss", loss, 0, 0.5),
        ("--swing", swing, 0, 1),
        ("--temperature", temperature, 0, 100),
    ):
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"{value:g} must be from {least:g} to {most:g}", param_hint=flag)
    if measured is not None and (target is not None or draft is not None):
        raise typer.BadParameter("it is in place of --target and --draft: give it or them", param_hint="--measured")
    if survive == "zone" and zones < 2:
        raise typer.BadParameter("a deployment in one zone cannot survive its loss: set --zones 2 or more")
    notes = Console(stderr=True, highlight=False)
    with reported_errors(notes), Progress(notes) as progress:
        from specdec.plan.inputs.devices import PlanImpossible
        from specdec.plan.inputs.trace_file import read_trace
        from specdec.plan.inputs.traffic import Lengths, Rate

        progress.part("plan")
        try:
            question = _question(
                target, draft, devices, draft_devices, measured, acceptance, temperature, delay_ms, loss
            )
            traffic: Traffic
            if trace is not None:
                unit_s = 1e-3 if timestamp_unit == "ms" else 1.0
                traffic = read_trace(trace, rate, keep_gaps=keep_gaps, seed=seed, timestamp_s=unit_s)
            elif rate is None:
                raise PlanImpossible("no traffic: give --rate or --trace")
            else:
                prompts = Lengths.parse(prompt_tokens, "--prompt-tokens")
                outputs = Lengths.parse(output_tokens, "--output-tokens")
                traffic = Rate(per_s=rate, prompts=prompts, outputs=outputs, burstiness=burstiness, swing=swing)
            _plan(
                question,
                traffic,
                (ttft_ms / 1e3, itl_ms / 1e3),
                survive,
                zones,
                speculation,
                autoscale,
                range(seed, seed + seeds),
                (target_source, draft_source),
                _allowances(api_keys),
                out,
                progress,
                notes,
            )
        except PlanImpossible as error:
            raise ClusterFailed(str(error)) from error


def _question(
    target: Path | None,
    draft: Path | None,
    devices: str,
    draft_devices: str,
    measured: Path | None,
    acceptance: str,
    temperature: float,
    delay_ms: float,
    loss: float,
) -> Question:
    from specdec.plan.deployment import Question
    from specdec.plan.inputs.devices import PlanImpossible, devices_of, measured_machine
    from specdec.plan.inputs.models import read_model
    from specdec.plan.inputs.step_times import acceptance_of, read_measured

    if measured is not None:
        found, machine = read_measured(measured, temperature), measured_machine(devices)
        return Question(
            target=None,
            draft=None,
            devices=[machine],
            draft_devices=[measured_machine(draft_devices) if draft_devices else machine],
            acceptance=found.acceptance,
            measured=found,
            delay_s=delay_ms / 1e3,
            loss=loss,
        )
    if target is None:
        raise PlanImpossible("no model: give --target (a folder or a config.json), or --measured")
    own = devices_of(devices)
    return Question(
        target=read_model(target),
        draft=None if draft is None else read_model(draft),
        devices=own,
        draft_devices=devices_of(draft_devices) if draft_devices else own,
        acceptance=acceptance_of(acceptance),
        delay_s=delay_ms / 1e3,
        loss=loss,
    )


def _allowances(api_keys: Path | None) -> dict[str, Allowance]:
    from specdec.coordinator.tenants.api_keys import KeyFileInvalid, read_key_file
    from specdec.coordinator.tenants.quotas import Allowance
    from specdec.plan.inputs.devices import PlanImpossible

    if api_keys is None:
        return {}
    try:
        return {key.tenant: key.allowance(Allowance()) for key in read_key_file(api_keys)}
    except KeyFileInvalid as error:
        raise PlanImpossible(f"--api-keys {api_keys}: {error}") from error


def _plan(
    question: Question,
    traffic: Traffic,
    wanted_s: tuple[float, float],
    survive: str,
    zones: int,
    speculation: str,
    autoscale: bool,
    seeds: range,
    sources: tuple[str, str],
    allowances: Mapping[str, Allowance],
    out: Path,
    progress: Progress,
    notes: Console,
) -> None:
    from specdec.plan.assumptions import assumptions_of, with_context
    from specdec.plan.autoscaled import days
    from specdec.plan.results.page import page, tables_of
    from specdec.plan.results.sweep import plots, sweep, uses
    from specdec.plan.results.values_file import values_file
    from specdec.plan.search import search
    from specdec.plan.simulation.faults import Scope
    from specdec.plan.simulation.pair import Speculation
    from specdec.plan.trial import Objectives, Trials

    mode = Speculation(speculation)
    scopes = [Scope.REPLICA, Scope.NODE, Scope.ZONE][: ["nothing", "replica", "node", "zone"].index(survive)]
    trials = Trials(traffic.peak, Objectives(*wanted_s), zones, scopes, loss=question.loss, allowances=allowances)
    question = with_context(question, traffic)
    found = search(question, trials, mode, seeds, progress.tell)
    points = sweep(question, trials, found, mode, seeds, progress.tell)
    parts = uses(found, trials)
    scaled = days(found, trials, traffic, seeds, progress.tell) if autoscale else []
    tables = tables_of(found, points, parts, scaled)
    label = found.deployment.placement.label
    reasons = [f"{found.deployment.num_targets} targets: {label}.", *found.warnings]
    rule = scaled[0].rule if scaled and scaled[0].holds else None
    values = values_file(found.deployment, mode, sources, reasons, rule)
    title = f"Plan for {traffic.per_s:.3g} requests per second"
    text = page(title, assumptions_of(question, trials, mode, seeds), tables, plots(points, label), values)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH, highlight=False)
    for table in tables:
        table.print(console)
    console.print(f"Full first: {parts[0].part} ({parts[0].share:.0%}).", markup=False)
    file = out.with_suffix(".html")
    try:
        out.write_text(values, encoding="utf-8")
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}", param_hint="--out") from error
    notes.print(
        f"{trials.num_runs} fleets simulated. Values: {out}   page: {file}   all figures are predictions",
        markup=False,
        soft_wrap=True,
    )
