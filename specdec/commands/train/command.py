"""`specdec train`: train a drafter for a target on your prompts, and report its acceptance and speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from specdec.commands.connection import client_settings, parse_address
from specdec.commands.errors import ClusterFailed, reported_errors
from specdec.commands.inputs.option_values import prompts_from, temperatures, whole_numbers
from specdec.commands.measuring.progress import Progress
from specdec.commands.up.command import TargetModel, stop_on_signals
from specdec.commands.up.plan import shipped_model
from specdec.commands.views.tables import make_table
from specdec.engine.errors import EngineError
from specdec.telemetry import setup_logging

if TYPE_CHECKING:
    from specdec.commands.train.acceptance import MeasuredAcceptance
    from specdec.commands.train.recipe import Recipe
    from specdec.commands.train.recorded.continued import ContinuationTask, ServingCoordinator
    from specdec.commands.train.worth import StepCosts

_MOST_TOKENS = 32_000
"""Tokens that a head can propose unless the user says otherwise."""
_TEXTS = "Texts"
_DRAFTER = "Drafter"


def _address(value: str | None) -> str | None:
    return None if value is None else parse_address(value)


def train(
    kind: Annotated[Literal["eagle3", "dspark", "medusa", "draft_model"], typer.Argument(help="Kind of drafter.")],
    prompts: Annotated[
        Path, typer.Option(help="File of prompts like your users', as for `specdec bench`.", dir_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint and its report.", file_okay=False)],
    target: TargetModel = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts to measure on. (default: every tenth of --prompts)",
            dir_okay=False,
            rich_help_panel=_TEXTS,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each output.", min=8, rich_help_panel=_TEXTS)] = 128,
    temperature: Annotated[
        str, typer.Option(help="Temperatures of the target's outputs: those of your users.", rich_help_panel=_TEXTS)
    ] = "1,0",
    address: Annotated[
        str | None,
        typer.Option(
            help="Coordinator that serves the target, to make the outputs. (default: this process makes them)",
            metavar="HOST:PORT",
            callback=_address,
            rich_help_panel=_TEXTS,
        ),
    ] = None,
    loss: Annotated[
        Literal["kl", "tv", "lk", "lk_alpha", "coupled"],
        typer.Option(help="Loss to minimise; `coupled` is minus the log of the acceptance."),
    ] = "kl",
    steps: Annotated[int, typer.Option(help="Number of training batches.", min=1)] = 400,
    batch: Annotated[int, typer.Option(help="Texts per batch.", min=1)] = 8,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.", min=1e-7, max=1.0)] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of outputs, weights and order.", min=0)] = 0,
    depth: Annotated[
        int, typer.Option(help="Tokens that it learns to draft ahead.", min=1, max=16, rich_help_panel=_DRAFTER)
    ] = 4,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            help=f"Number of tokens that a head can propose: the most frequent ones. (default: {_MOST_TOKENS} at most)",
            min=2,
            rich_help_panel=_DRAFTER,
            show_default=False,
        ),
    ] = None,
    kept_tokens: Annotated[
        int,
        typer.Option(
            help="Likeliest tokens whose probabilities are learned one by one.", min=1, rich_help_panel=_DRAFTER
        ),
    ] = 64,
    sampled_tokens: Annotated[
        int,
        typer.Option(
            help="Other tokens that are drawn in each step to estimate what is left.", min=1, rich_help_panel=_DRAFTER
        ),
    ] = 4096,
    layer_ids: Annotated[
        str | None,
        typer.Option(
            help="Layers that eagle3 and dspark read; k is the output of k layers.",
            rich_help_panel=_DRAFTER,
            metavar="K,...",
        ),
    ] = None,
    layers: Annotated[
        int, typer.Option(help="Layers of a draft, of dspark, or of each Medusa head.", min=1, max=64)
    ] = 1,
    hidden_size: Annotated[int, typer.Option(help="Hidden size of a draft.", min=16, rich_help_panel=_DRAFTER)] = 256,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the MLP.", min=1, rich_help_panel=_DRAFTER, show_default=False)
    ] = None,
    markov_rank: Annotated[
        int,
        typer.Option(
            help="Rank of dspark's correction of a token by the one before it.", min=0, rich_help_panel=_DRAFTER
        ),
    ] = 64,
    initial_draft: Annotated[
        Path | None, typer.Option(help="Draft to continue training from.", file_okay=False, rich_help_panel=_DRAFTER)
    ] = None,
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Compute in bfloat16, which some machines do faster.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device of the training.", metavar="cpu|cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1, max=256)] = 1,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for texts, hidden states and the run's state. (default: OUT-work)", file_okay=False),
    ] = None,
) -> None:
    """Train a small draft or a head (EAGLE-3, DSpark, Medusa) for a target, in a format of other engines.

    The target answers the prompts; the drafter learns from the target's hidden states or probabilities. The report has
    acceptance on held-out prompts before and after, and the speed on this machine. An interrupted run continues with
    the same command.
    """
    asked_prompts = prompts_from(prompts).prompts
    asked_held_out = () if held_out is None else prompts_from(held_out).prompts
    sampled_at = temperatures(temperature, "--temperature")
    ids = () if layer_ids is None else whole_numbers(layer_ids, "--layer-ids")
    if initial_draft is not None and kind != "draft_model":
        raise typer.BadParameter("only draft_model continues from a draft", param_hint="--initial-draft")
    if ids and kind not in ("eagle3", "dspark"):
        raise typer.BadParameter("only eagle3 and dspark read layers", param_hint="--layer-ids")
    if draft_vocab_size is not None and kind == "draft_model":
        raise typer.BadParameter("a draft_model proposes all tokens", param_hint="--draft-vocab-size")
    # These import torch, which takes seconds.
    from specdec.commands.train.recipe import Recipe
    from specdec.commands.train.recorded.continued import ContinuationTask, ServingCoordinator

    notes = Console(stderr=True, highlight=False)
    setup_logging("train", "warning", "console")
    with reported_errors(notes), stop_on_signals(), Progress(notes) as progress:
        progress.part(f"train {kind}")
        recipe = Recipe(
            kind=kind,
            loss=loss,
            seed=seed,
            num_steps=steps,
            batch_sequences=batch,
            learning_rate=learning_rate,
            num_depths=depth,
            draft_vocab_size=None if kind == "draft_model" else draft_vocab_size or _MOST_TOKENS,
            num_kept=kept_tokens,
            num_sampled=sampled_tokens,
            layer_ids=ids,
            num_layers=layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            markov_rank=markov_rank,
            initial_draft=None if initial_draft is None else str(initial_draft),
            reduced_precision=reduced_precision,
        )
        asked = ContinuationTask(
            prompts=asked_prompts,
            held_out=asked_held_out,
            temperatures=sampled_at,
            max_tokens=max_tokens,
            seed=seed,
        )
        service = (
            None if address is None else ServingCoordinator(address, client_settings(None, False, None, None, None))
        )
        folder = work or out.with_name(f"{out.name}-work")
        try:
            _run(target or shipped_model("target"), device, threads, recipe, asked, service, out, folder, progress)
        except (EngineError, ValueError) as error:
            raise ClusterFailed(str(error)) from error
        except OSError as error:
            raise ClusterFailed(f"{error.filename or out}: {error.strerror or error}") from error
        except KeyboardInterrupt:
            notes.print("Stopped: the same command continues from here.", style="dim")
            raise


def _run(
    target: str,
    device: str,
    threads: int,
    recipe: Recipe,
    asked: ContinuationTask,
    service: ServingCoordinator | None,
    out: Path,
    work: Path,
    progress: Progress,
) -> None:
    import torch

    from specdec.commands.train.job import load_target, run, write_report
    from specdec.commands.train.recorded.continued import make_texts
    from specdec.commands.train.worth import measured_costs, worth_json

    torch.set_num_threads(threads)
    progress.tell(f"loading {target}")
    loaded = load_target(target, device, threads)
    texts = make_texts(asked, loaded.engine, loaded.runner, work, progress.tell, service)
    trained = run(loaded, texts, recipe, out, work, progress.tell)
    progress.tell("step times")
    costs = measured_costs(loaded, recipe, out)
    report: dict[str, Any] = {
        "target": loaded.parts.name,
        "recipe": recipe.as_json(),
        "num_texts": len(texts),
        "num_tokens": sum(len(text.token_ids) for text in texts if not text.is_held_out),
        **trained.as_json(),
        **worth_json(costs, trained.after),
    }
    report["recipe"]["initial_draft"] = recipe.initial_draft and Path(recipe.initial_draft).name
    write_report(out, report)
    _show(trained.before, trained.after, costs, recipe, out, work)


def _show(
    before: list[MeasuredAcceptance],
    after: list[MeasuredAcceptance],
    costs: StepCosts,
    recipe: Recipe,
    out: Path,
    work: Path,
) -> None:
    from specdec.commands.train.worth import speeds

    console = Console(highlight=False)
    for old, new in zip(before, after, strict=True):
        table = make_table(
            f"Temperature {new.temperature:g}: accepted up to this depth, at {new.num_places} held-out places",
            "depth",
            "before",
            "after, coupled",
            "after, ratio test",
            "tokens a step",
            "tokens/s here",
            "over plain",
        )
        for speed, was, share, ratio in zip(
            speeds(new.coupled, costs), old.coupled, new.coupled, new.ratio, strict=True
        ):
            table.add_row(
                str(speed.num_draft_tokens),
                f"{was:.3f}",
                f"{share:.3f}",
                f"{ratio:.3f}",
                f"{speed.tokens_per_step:.2f}",
                f"{speed.tokens_per_s:.0f}",
                f"{speed.speedup:.2f}x",
            )
        console.print(table)
    use = f"specdec up --draft {out}" if recipe.kind == "draft_model" else f"specdec up --drafter {recipe.kind}={out}"
    console.print(escape(f"Use it: {use}"), soft_wrap=True)
    console.print(escape(f"The folder {work} may be removed."), style="dim", soft_wrap=True)
