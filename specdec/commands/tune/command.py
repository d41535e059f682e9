"""`specdec tune`: measure a pair on your prompts, advise settings with reasons, and write them to files."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

import specdec
from specdec.commands.errors import ClusterFailed, reported_errors
from specdec.commands.inputs.option_values import (
    MOST_TOKENS,
    output_file,
    prompts_from,
    report_folder,
    temperatures,
    whole_numbers,
)
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.prompts import prompts_for
from specdec.commands.measuring.report import Report, machine
from specdec.commands.tune.pages import plots_of, results, tables_of
from specdec.commands.tune.placements import PlacementWish, Tuned, apart, tune_placements
from specdec.commands.tune.prediction import MODES
from specdec.commands.tune.probe_processes import Questions
from specdec.commands.tune.settings_files import DeploymentFacts, chart_file, up_file
from specdec.commands.up.command import Device, DraftModel, TargetModel, stop_on_signals
from specdec.commands.up.plan import shipped_model
from specdec.drafting.translation.shared import method_for, shared_of_files
from specdec.engine.checkpoints.files import find_model_files, read_tokenizer
from specdec.engine.errors import ModelLoadError
from specdec.engine.settings import EngineSettings

_LOG_WIDTH = 200
_MOST_AT_ONCE: int = EngineSettings.model_fields["max_batch_seqs"].default
_NAME = "specdec-tune"
_ASKED = "Requests"


def tune(
    target: TargetModel = None,
    draft: DraftModel = None,
    device: Device = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts like your users', as for `specdec bench`. "
            "(default: the shipped prompts for the shipped pair, else a few in English)",
            dir_okay=False,
            rich_help_panel=_ASKED,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts.", min=1, rich_help_panel=_ASKED)] = 8,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of each answer.", min=8, max=MOST_TOKENS, rich_help_panel=_ASKED)
    ] = 64,
    temperature: Annotated[
        str, typer.Option(help="Temperatures of your users' requests.", rich_help_panel=_ASKED)
    ] = "0,1",
    concurrency: Annotated[
        str, typer.Option(help="Expected numbers of requests at once.", rich_help_panel=_ASKED)
    ] = "1,4,8",
    verify_mode: Annotated[
        Literal["coupled", "rejection", "any"], typer.Option(help="Verification modes to choose from.")
    ] = "any",
    placement: Annotated[
        PlacementWish,
        typer.Option(
            help="apart: a draft service with its own cores; together: the target runs the draft in turns with "
            "itself. On CPU auto tries both and advises the faster one; on GPUs it is apart.",
        ),
    ] = "auto",
    repeats: Annotated[
        int, typer.Option(help="Runs with and without speculation that check the advice; 0: none.", min=0)
    ] = 2,
    out: Annotated[
        Path,
        typer.Option(
            help="File for `specdec up --config`; the chart's values go to NAME.chart.yaml.",
            dir_okay=False,
            callback=output_file,
        ),
    ] = Path("specdec-tuned.yaml"),
    report: Annotated[
        Path | None, typer.Option(help="Folder for JSON, a page and plots.", file_okay=False, callback=report_folder)
    ] = None,
) -> None:
    """Measure step times and acceptance of a pair on this machine, and advise settings.

    The advice says whether to speculate, with which draft length, width, heads, mode and placement, or why not. Its
    speed is compared with plain decoding first. Use the files with `specdec up --config FILE` and `helm install -f
    FILE`. Stop other work on the machine before, because the command measures time.
    """
    sampled_at = temperatures(temperature, "--temperature")
    loads = whole_numbers(concurrency, "--concurrency")
    if max(loads) > _MOST_AT_ONCE:
        words = f"a step takes {_MOST_AT_ONCE} sequences at most: tune for that many, and add targets for more"
        raise typer.BadParameter(words, param_hint="--concurrency")
    own = None if prompts is None else prompts_from(prompts)
    notes = Console(stderr=True, highlight=False)
    with reported_errors(notes), stop_on_signals(), Progress(notes) as progress:
        target_model, draft_model = target or shipped_model("target"), draft or shipped_model("draft")
        progress.part("tune")
        progress.tell("looking for the models")
        digests = [_tokenizer_digest(model) for model in (target_model, draft_model)]
        shared = None if digests[0] == digests[1] else _shared(target_model, draft_model)
        used = own or prompts_for(digests[0])
        if shared is not None:
            notes.print(f"tokenizers: the draft's differs; {shared}", markup=False, soft_wrap=True)
        notes.print(f"prompts: {used.source}; {min(num_prompts, len(used.prompts))} are used", markup=False)
        questions = Questions(
            target_model=target_model,
            draft_model=draft_model,
            prompts=used.prompts[:num_prompts],
            temperatures=sampled_at,
            max_tokens=max_tokens,
            loads=loads,
            is_translated=shared is not None,
        )
        modes = MODES if verify_mode == "any" else (verify_mode,)
        found = tune_placements(questions, device, placement, modes, repeats, progress.tell)
    best = found[0]
    _show(questions, best, used.source, report, notes)
    if len(found) > 1:
        rates = ", ".join(f"{one.where.placement} {one.tokens_per_s:.0f}" for one in found)
        how = "decoded" if repeats else "predicted"
        notes.print(f"placement: {best.where.placement} (tokens/s {how}: {rates})")
    if best.where.target_cores:
        own_cores = {"target": best.where.target_cores, "draft": best.where.draft_cores}
        words = ", ".join(f"{role} {' '.join(map(str, cores))}" for role, cores in own_cores.items())
        notes.print(f"cores: {words}")
    _write(questions, best, apart(found), out, notes)


def _shared(target_model: str, draft_model: str) -> str:
    """The share of the target's tokens that a draft has, in words. Raises ClusterFailed if it would draft text."""
    try:
        vocabulary = shared_of_files(target_model, draft_model)
        method = method_for(vocabulary, "auto")
    except ModelLoadError as error:
        raise ClusterFailed(str(error)) from error
    has = f"it has {vocabulary.num_shared} of the target's {vocabulary.num_named} tokens ({vocabulary.share:.0%})"
    if method == "text":
        raise ClusterFailed(
            f"{draft_model} has another tokenizer than {target_model}: {has}, so it drafts text. Its proposals then "
            "depend on how its own text is cut into the target's tokens, so the target's outputs do not show its "
            "acceptance. Run it with specdec up, and measure it with specdec bench"
        )
    return f"{has} and drafts those"


def _tokenizer_digest(model: str) -> str:
    try:
        folder, _ = find_model_files(model, None)
        return read_tokenizer(folder).digest
    except (ModelLoadError, OSError, ValueError) as error:
        raise ClusterFailed(str(error)) from error


def _show(questions: Questions, tuned: Tuned, source: str, folder: Path | None, notes: Console) -> None:
    measured, advice = tuned.measured, tuned.advice
    output = Console(highlight=False)
    if not output.is_terminal:
        output = Console(width=_LOG_WIDTH, highlight=False)
    pair = f"target {questions.target_model}, draft {questions.draft_model}"
    facts: dict[str, object] = {
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "specdec": specdec.__version__,
        "prompts": source,
        "num_prompts": len(questions.prompts),
        "max_tokens": questions.max_tokens,
        "placement": tuned.where.placement,
        "draft_has_another_tokenizer": questions.is_translated,
        "machine": machine(sorted(os.sched_getaffinity(0))),
    }
    found = Report(pair=pair, facts=facts, console=output)
    found.add("tune", results(measured, advice), tables_of(measured, advice), plots_of(measured, advice, pair))
    choice = advice.choice
    if advice.speculate:
        output.print(
            f"\nSpeculate: {choice.draft_tokens} draft tokens, {choice.num_siblings} runners-up, "
            f"{choice.max_heads} heads, {choice.mode} mode.",
            style="bold",
        )
    else:
        output.print("\nDo not speculate with this pair on this machine.", style="bold")
    for reason in advice.reasons:
        output.print(f"- {escape(reason)}", soft_wrap=True)
    if folder is not None:
        try:
            notes.print(f"report: {found.save(folder, _NAME)}", markup=False, soft_wrap=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}", param_hint="--report") from error


def _write(questions: Questions, best: Tuned, for_pods: Tuned, out: Path, notes: Console) -> None:
    chart = out.with_name(f"{out.stem}.chart.yaml")
    try:
        out.write_text(up_file(best.advice, _deployment(questions, best)), encoding="utf-8")
        chart.write_text(chart_file(for_pods.advice, _deployment(questions, for_pods)), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}", param_hint="--out") from error
    notes.print(f"Use it: specdec up --config {out}   or: helm install -f {chart} ...", markup=False, soft_wrap=True)


def _deployment(questions: Questions, tuned: Tuned) -> DeploymentFacts:
    where = tuned.where
    return DeploymentFacts(
        target_model=questions.target_model,
        draft_model=questions.draft_model,
        device=where.target_device.partition(":")[0],
        target_cores=where.target_cores,
        draft_cores=where.draft_cores,
        placement=where.placement,
        is_translated=questions.is_translated,
    )
