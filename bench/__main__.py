"""`python -m bench`: measure, print tables, keep results with the machine and the versions.

python -m bench                                          # cpu-80m on CPU: decoding, all systems, step times
python -m bench --only sweep --sweep concurrency,delay   # what is not part of the usual run
python -m bench --only arrivals --pair shipped
python -m bench --device cuda --pair gpu-8b
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from bench import adversity, arrivals, decode, steps, sweep
from bench.deployment import pinned
from bench.packaged import PackageUnusable
from bench.pairs import PAIRS, NoSuchPair, Pair, resolve_pair
from bench.plan import BenchPlan
from bench.prompts import held_out_prompts
from bench.report import file_name, versions
from bench.systems import compare, drafters
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report, machine
from specdec.commands.up.command import stop_on_signals

RESULTS = Path(__file__).parent / "results"
PARTS = ("decode", "systems", "steps", "sweep", "arrivals", "adversity", "drafters", "calibration")
_USUAL = PARTS[:3]
_CHECK_PROMPTS, _CHECK_TOKENS = 2, 32
_AGREE_PROMPTS = 8
_LOG_WIDTH = 200
"""Characters of a line where the output is no terminal."""
_MOST_CHECKED_BYTES = 48 << 30
"""Bytes of a checkpoint above which it is compared with its source in bfloat16: no GPU holds it in float32."""


def main(
    pair: Annotated[str, typer.Option(help=f"{', '.join(PAIRS)}, or TARGET:DRAFT of names and folders.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    placement: Annotated[
        Literal["apart", "together"],
        typer.Option(help="Where the draft runs: as a service, or in the target's process, in turns."),
    ] = "apart",
    cores: Annotated[int, typer.Option(help="Cores that every system may use; 0: all.", min=0)] = 0,
    only: Annotated[str, typer.Option(help=f"Comma-separated parts: {', '.join(PARTS)}.")] = ",".join(_USUAL),
    sweeps: Annotated[
        str, typer.Option("--sweep", help=f"Comma-separated: {', '.join(sweep.SWEEPS)}.")
    ] = "concurrency",
    systems: Annotated[str, typer.Option(help="Comma-separated beginnings of systems' names; none: all systems.")] = "",
    sets: Annotated[
        str, typer.Option(help=f"Comma-separated sets of drafters: {', '.join(drafters.NAMES)}; none: all.")
    ] = "",
    repeats: Annotated[int, typer.Option(help="Runs of each prompt by each system.", min=1)] = 2,
    rounds: Annotated[
        int, typer.Option(help="Requests per place of a batch, one after the other (closed loop); 1: no loop.", min=1)
    ] = 1,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(min=8)] = 96,
    batch: Annotated[str, typer.Option(help="Comma-separated numbers of requests at once.")] = "1,8",
    temperature: Annotated[str, typer.Option(help="Comma-separated temperatures.")] = "0,1",
    verify_mode: Annotated[str, typer.Option(help="coupled or rejection")] = "coupled",
    sync_tokens: Annotated[str, typer.Option(help="Draft tokens of synchronous speculation.")] = "4",
    sync_hold_off_ms: Annotated[
        float, typer.Option(help="Longest wait of synchronous speculation for the draft.", min=0)
    ] = 10.0,
    peer_tokens: Annotated[
        str, typer.Option(help="Draft tokens that other systems are tried with; the fastest counts.")
    ] = "3,5,8",
    rates: Annotated[str, typer.Option(help="Arrivals per second; none: doubled until saturation.")] = "",
    seconds: Annotated[float, typer.Option(help="Seconds of arrivals at each rate.", min=0.1)] = 20.0,
    bursts: Annotated[str, typer.Option(help="Requests at one moment.")] = "8,32",
    first_token_slo_ms: Annotated[float, typer.Option(help="Limit of goodput on the time to the first token.")] = 500.0,
    per_token_slo_ms: Annotated[float, typer.Option(help="Limit of goodput on the mean time per later token.")] = 50.0,
    shapes: Annotated[
        str, typer.Option(help="Comma-separated shapes whose steps are timed: target, draft, llama-1b, llama-8b.")
    ] = "",
    check: Annotated[bool, typer.Option(help="Compare inflated models with their sources first.")] = True,
    save: Annotated[bool, typer.Option(help="Write <date>-<device>-<pair>.* into --results.")] = True,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Measure and report."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    parts = _chosen("--only", only, PARTS)
    wanted_sweeps = _chosen("--sweep", sweeps, tuple(sweep.SWEEPS))
    usable = tuple(sorted(os.sched_getaffinity(0)))
    used = usable[:cores] if cores else usable
    with stop_on_signals(), Progress(console) as progress, pinned(used):
        progress.part("pair")
        progress.tell("making its checkpoints, if they are not there")
        try:
            made = resolve_pair(pair or ("cpu-80m" if device == "cpu" else "gpu-8b"), device)
        except (NoSuchPair, PackageUnusable) as error:
            raise typer.BadParameter(str(error), param_hint="--pair") from error
        plan = BenchPlan(
            pair=made,
            cores=used,
            device=device,
            placement=placement,
            num_prompts=prompts,
            max_tokens=max_tokens,
            repeats=repeats,
            rounds=rounds,
            batches=tuple(map(int, batch.split(","))),
            temperatures=tuple(map(float, temperature.split(","))),
            verify_mode=verify_mode,
            systems=tuple(_names(systems)),
            sets=tuple(_chosen("--sets", sets, drafters.NAMES)),
            sync_tokens=tuple(map(int, _names(sync_tokens))),
            sync_hold_off_ms=sync_hold_off_ms,
            peer_tokens=tuple(map(int, _names(peer_tokens))),
            rates=tuple(map(float, _names(rates))),
            seconds=seconds,
            bursts=tuple(map(int, _names(bursts))),
            first_token_slo_ms=first_token_slo_ms,
            per_token_slo_ms=per_token_slo_ms,
        )
        facts = {"machine": machine(used, device), "versions": versions(), "plan": plan.facts()}
        found = Report(pair=made.description, facts=facts, console=console)
        console.print(made.description, soft_wrap=True, highlight=False)
        if check:
            _check(made, device, found, progress)
        began_s = time.monotonic()
        if "decode" in parts:
            decode.run(plan, found, progress)
        if "systems" in parts:
            compare.run(plan, found, progress)
        if "steps" in parts:
            steps.run(_names(shapes), plan, found, progress)
        if "sweep" in parts:
            sweep.run(wanted_sweeps, plan, found, progress)
        if "arrivals" in parts:
            arrivals.run(plan, found, progress)
        if "adversity" in parts:
            adversity.run(plan, found, progress)
        if "drafters" in parts:
            drafters.run(plan, found, progress)
        if "calibration" in parts:
            from bench.calibration import comparison  # it needs the extra `plan`

            comparison.run(plan, found, progress)
        facts["load_average_at_the_end"] = [round(load, 2) for load in os.getloadavg()]
        facts["seconds"] = round(time.monotonic() - began_s, 1)
    if save:
        console.print(f"results: {found.save(results, file_name(made.name, device))}")


def _check(pair: Pair, device: str, found: Report, progress: Progress) -> None:
    """Compare inflated models with their sources. Raises TokensNotSame."""
    import torch

    from bench.sameness import agreement, check_sameness

    progress.part("check")
    results: dict[str, object] = {}
    for model in (pair.target, pair.draft):
        if model.source is None:
            continue
        progress.tell(f"comparing {model.name} with its source")
        is_huge = 2 * sum(file.stat().st_size for file in model.folder.glob("*.safetensors")) > _MOST_CHECKED_BYTES
        sameness = check_sameness(
            model.source,
            model.folder,
            held_out_prompts(model.folder, _CHECK_PROMPTS),
            num_tokens=_CHECK_TOKENS,
            device=device,
            dtype=torch.bfloat16 if is_huge else torch.float32,
        )
        results[model.name] = sameness.as_facts()
        found.console.print(
            f"{model.name} has its source's output: {sameness.num_equal} of {sameness.num_tokens} greedy tokens, "
            f"largest difference of a logit {sameness.largest_logit_difference:.1e} ({sameness.dtype})",
            highlight=False,
            soft_wrap=True,
        )
    found.results["same_tokens"] = results
    if pair.target.source is not None and pair.draft.source is not None:  # small models with the same outputs
        progress.tell("comparing the draft with the target")
        prompts = held_out_prompts(pair.target.folder, _AGREE_PROMPTS)
        (share,) = agreement(pair.target.source, [pair.draft.source], prompts)
        found.results["agreement"] = share
        found.console.print(f"the draft guesses {share:.2f} of the target's greedy tokens", highlight=False)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _chosen(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    names = _names(text)
    if unknown := [name for name in names if name not in allowed]:
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(allowed)}", param_hint=option)
    return names


typer.run(main)
