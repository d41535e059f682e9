"""`python -m bench`: measure, print tables, keep raw results with the machine and the versions.

python -m bench                 # the shipped pair on CPU: decoding, its parts, peers, step times
python -m bench --device cuda   # the same on a GPU, with step times of random-weight Llama shapes
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import decode, peers, report, steps

RESULTS = Path(__file__).parent / "results"


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[str, typer.Option(help="Comma-separated parts: decode, peers, steps.")] = "",
    repeats: Annotated[int, typer.Option(help="Times each prompt is run with and without speculation.", min=1)] = 3,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(min=8)] = 128,
    batch: Annotated[str, typer.Option(help="Comma-separated numbers of requests at once.")] = "1,8",
    temperature: Annotated[str, typer.Option(help="Comma-separated temperatures.")] = "0,1",
    shapes: Annotated[str, typer.Option(help="Comma-separated shapes for step times.")] = "",
    save: Annotated[bool, typer.Option(help="Write bench/results/<date>-<device>.json.")] = True,
) -> None:
    """Measure and report."""
    console = Console()
    parts = [part for part in only.split(",") if part] or ["decode", "peers", "steps"]
    plan = decode.Plan(
        device=device,
        num_prompts=prompts,
        max_tokens=max_tokens,
        repeats=repeats,
        batches=tuple(map(int, batch.split(","))),
        temperatures=tuple(map(float, temperature.split(","))),
    )
    results: dict[str, object] = {
        "machine": report.machine(),
        "versions": report.versions(),
        "plan": report.plain(plan),
    }
    if "decode" in parts:
        results["decode"] = decode.run(plan, console)
    if "peers" in parts:
        results["peers"] = peers.run(plan, console)
    if "steps" in parts:
        names = [name for name in shapes.split(",") if name] or steps.default_shapes(device)
        results["steps"] = steps.run(names, device, console)
    if save:
        console.print(f"raw results: {report.save(results, RESULTS, device)}")


typer.run(main)
