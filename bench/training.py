"""Trains drafters of several kinds with several losses on the same texts, and compares their acceptance.

    python models/head_prompts.py --out prompts.jsonl --count 300
    python -m bench.training --prompts prompts.jsonl --work DIR                              # losses by kind
    python -m bench.training --prompts prompts.jsonl --work DIR --losses kl --costs \
        --kinds eagle3,dspark,medusa,draft_model                                             # kinds and their speed

The target is the shipped one, on CPU with one thread. Runs of one seed have the same initial weights and the same order
of texts, so their steps are comparable between losses. Finished runs are kept in DIR and are not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console

from bench.report import file_name, versions
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.prompts import read_prompts
from specdec.commands.measuring.report import Report, machine
from specdec.commands.measuring.tables import Table
from specdec.commands.shipped_pair import shipped_pair
from specdec.commands.train.acceptance import MeasuredAcceptance, acceptance
from specdec.commands.train.job import Loaded, learn, load_target, make_trainee
from specdec.commands.train.losses import LOSSES
from specdec.commands.train.recipe import KINDS, Recipe
from specdec.commands.train.recorded.continued import ContinuationTask, make_texts
from specdec.commands.train.recorded.states import States, check_logits, record_states
from specdec.commands.train.worth import StepCosts, measured_costs, speeds

RESULTS = Path(__file__).parent / "results"
TEMPERATURES = (1.0, 0.0)
# Heads have the target's width and the shipped head's vocabulary; the draft has the shipped draft's shape.
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "eagle3": Recipe(kind="eagle3", draft_vocab_size=1024, intermediate_size=384),
        "dspark": Recipe(kind="dspark", draft_vocab_size=1024, intermediate_size=384, num_layers=2),
        "medusa": Recipe(kind="medusa", draft_vocab_size=1024),
        "draft_model": Recipe(kind="draft_model", num_layers=2, hidden_size=256, intermediate_size=384),
    }
)
_WIDTH = 160
_SHIPPED = "the shipped draft"


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """Result of one run."""

    recipe: Recipe
    folder: Path
    """Folder of the checkpoint."""
    cpu_s: float
    """CPU seconds of the training steps."""
    num_learned: int
    """Trained parameters."""
    after: list[MeasuredAcceptance]

    def at(self, temperature: float) -> MeasuredAcceptance:
        """Acceptance on the outputs of one temperature."""
        return next(each for each in self.after if each.temperature == temperature)

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values, which `_trained` reads back."""
        draft = self.recipe.initial_draft
        return {
            "recipe": {**self.recipe.as_json(), "initial_draft": draft and Path(draft).name},
            "cpu_s": round(self.cpu_s, 1),
            "num_learned": self.num_learned,
            "after": [dataclasses.asdict(each) for each in self.after],
        }


def main() -> None:
    """Train, and write a page to the folder of results."""
    options = _options()
    torch.set_num_threads(1)
    pair = shipped_pair()
    if pair is None:
        sys.exit("the shipped pair is not here")
    console = Console(width=_WIDTH)
    with Progress(console) as progress:
        progress.part("texts")
        loaded = load_target(str(pair / "target"), "cpu", 1)
        states = _states(loaded, options, pair, progress)
        outcomes = []
        for kind in options.kinds:
            for seed in options.seeds:
                for loss in options.losses:
                    progress.part(f"{kind} with {loss}, seed {seed}")
                    recipe = replace(
                        RECIPES[kind],
                        loss=loss,
                        seed=seed,
                        num_steps=options.steps.get(kind, options.steps[""]),
                        batch_sequences=options.batch,
                        learning_rate=options.learning_rate,
                        num_depths=options.depth,
                        reduced_precision=True,
                    )
                    outcomes.append(_trained(loaded, states, recipe, options.work, progress))
        progress.part("the shipped draft")
        shipped = _shipped(loaded, states, pair / "draft", options.depth)
        costs: dict[str, StepCosts] = {}
        if options.costs:
            for one in [*outcomes, shipped]:
                progress.part(f"step times with {_name(one)}")
                if _name(one) not in costs:
                    costs[_name(one)] = measured_costs(loaded, one.recipe, one.folder)
    held_out = states.numbers(held_out=True)
    plan = {
        "steps": ", ".join(f"{kind} {options.steps.get(kind, options.steps[''])}" for kind in options.kinds),
        "texts_of_a_step": options.batch,
        "learning_rate": options.learning_rate,
        "seeds": options.seeds,
        "texts": len(states.texts) - len(held_out),
        "tokens": sum(len(each.token_ids) for each in states.texts if not each.is_held_out),
        "held_out_texts": len(held_out),
        "tokens_of_an_output_at_most": options.max_tokens,
    }
    report = Report(
        pair="Drafters for the shipped target, trained by `python -m bench.training`",
        facts={"machine": machine(sorted(os.sched_getaffinity(0))), "versions": versions(), "plan": plan},
        console=console,
    )
    tables = [losses_table(outcomes, kind, each) for kind in options.kinds for each in TEMPERATURES]
    tables += [kinds_table([*outcomes, shipped], costs)] if costs else []
    results = {
        "runs": [each.as_json() for each in outcomes],
        "shipped_draft": shipped.as_json(),
        "costs": {name: dataclasses.asdict(value) for name, value in costs.items()},
    }
    report.add("training", results, tables)
    name = file_name(f"training-{'-'.join(options.kinds)}", "cpu")
    console.print(f"results: {report.save(options.results, name)}", soft_wrap=True)


def losses_table(outcomes: Sequence[TrainingOutcome], kind: str, temperature: float) -> Table:
    """Acceptance by depth after training with each loss, as means over seeds."""
    found = [each for each in outcomes if each.recipe.kind == kind]
    depths = range(1, len(found[0].at(temperature).coupled) + 1)
    ways = ("coupled", "ratio") if temperature else ("coupled",)
    names = {"coupled": "coupled" if temperature else "", "ratio": "ratio test"}
    columns = ["loss", *(f"{names[way]} {n}".strip() for way in ways for n in depths)]
    columns += [*(f"tokens a step, {names[way]}".rstrip(", ") for way in ways), "CPU s"]
    table = Table(f"{kind}: accepted up to this depth at temperature {temperature:g}", columns)
    apart = 0.0
    for loss in dict.fromkeys(each.recipe.loss for each in found):
        runs = [each for each in found if each.recipe.loss == loss]
        cells: list[object] = [loss]
        totals: list[object] = []
        for way in ways:
            shares = [getattr(each.at(temperature), way) for each in runs]
            cells += [f"{statistics.fmean(column):.3f}" for column in zip(*shares, strict=True)]
            sums = [1 + sum(each) for each in shares]
            apart = max(apart, max(sums) - min(sums))
            totals.append(f"{statistics.fmean(sums):.3f}")
        table.add(*cells, *totals, f"{statistics.fmean(each.cpu_s for each in runs):.0f}")
    num_places, num_seeds = found[0].at(temperature).num_places, len({each.recipe.seed for each in found})
    table.notes.append(f"On {num_places} places that are held out; seeds: {num_seeds}.")
    if num_seeds > 1:
        table.notes.append(f"Tokens a step of one loss differ between seeds by {apart:.3f} at most.")
    return table


def kinds_table(outcomes: Sequence[TrainingOutcome], costs: Mapping[str, StepCosts]) -> Table:
    """Tokens per second of each drafter at its best length, for its first seed."""
    columns = ["drafter", "parameters learned", "steps", "CPU s", "to draft 1 token, all, ms"]
    for temperature in TEMPERATURES:
        at = f"at temperature {temperature:g}"
        columns += [f"tokens a step {at}", f"length, tokens/s {at}", "over plain"]
    table = Table("Drafting and verifying in turns, with step times measured here", columns)
    # The target's steps do not depend on the drafter: the fastest measurement of each is the least disturbed one.
    plain_ms = min(cost.plain_ms for cost in costs.values())
    verify_ms = [min(column) for column in zip(*(cost.verify_ms for cost in costs.values()), strict=True)]
    seen: set[str] = set()
    for one in outcomes:
        name = _name(one)
        if name in seen:
            continue
        seen.add(name)
        cost = StepCosts(plain_ms, verify_ms, costs[name].draft_ms)
        steps = one.recipe.num_steps if one.cpu_s else None
        cells: list[object] = [name, one.num_learned, steps, round(one.cpu_s) if one.cpu_s else None]
        cells.append(f"{cost.draft_ms[0]:.2f}, {cost.draft_ms[-1]:.2f}")
        for temperature in TEMPERATURES:
            accepted = one.at(temperature)
            best = max(speeds(accepted.coupled, cost), key=lambda speed: speed.tokens_per_s)
            cells += [f"{accepted.tokens_per_step:.2f}", f"{best.num_draft_tokens}, {best.tokens_per_s:.0f}"]
            cells.append(f"{best.speedup:.2f}x")
        table.add(*cells)
    verified = ", ".join(f"{each:.2f}" for each in verify_ms)
    table.notes.append(f"A plain step: {plain_ms:.2f} ms; one that verifies 1, 2, ... tokens: {verified} ms.")
    return table


def _name(one: TrainingOutcome) -> str:
    return f"{one.recipe.kind}, {one.recipe.loss}" if one.recipe.initial_draft is None else _SHIPPED


def _states(loaded: Loaded, options: argparse.Namespace, pair: Path, progress: Progress) -> States:
    asked = ContinuationTask(
        prompts=read_prompts(options.prompts).prompts,
        held_out=read_prompts(pair / "prompts.json").prompts,
        temperatures=TEMPERATURES,
        max_tokens=options.max_tokens,
        seed=0,
    )
    texts = make_texts(asked, loaded.engine, loaded.runner, options.work, progress.tell)
    check_logits(loaded.engine, loaded.runner, loaded.parts.lm_head, texts[0].prompt_ids[:64])
    taps = loaded.parts.taps(RECIPES["eagle3"])
    return record_states(loaded.engine, loaded.runner, texts, taps, options.work, progress.tell)


def _of_kind(states: States, loaded: Loaded, recipe: Recipe) -> States:
    """States of the layers that a recipe reads: all, or only the last."""
    return states if loaded.parts.taps(recipe) else replace(states, layer_ids=(), rows=states.rows[:, -1:])


def _trained(loaded: Loaded, states: States, recipe: Recipe, work: Path, progress: Progress) -> TrainingOutcome:
    folder = work / f"{recipe.kind}-{recipe.loss}-{recipe.seed}"
    file = folder / "outcome.json"
    if file.is_file():
        known = json.loads(file.read_text())
        if known["recipe"] == recipe.as_json():
            after = [MeasuredAcceptance(**each) for each in known["after"]]
            return TrainingOutcome(recipe, folder, known["cpu_s"], known["num_learned"], after)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"state-{recipe.kind}.pt").unlink(missing_ok=True)  # a resumed run would not count the seconds before
    began: list[float] = []
    ended = 0.0

    def on_step(done: int, loss: float) -> None:
        nonlocal ended
        ended = time.process_time()
        began.append(ended)

    found = learn(loaded.parts, _of_kind(states, loaded, recipe), recipe, folder, folder, progress.tell, on_step)
    # The first step is not timed; it counts like the others.
    cpu_s = (ended - began[0]) * recipe.num_steps / max(1, recipe.num_steps - 1)
    learned = sum(each.numel() for each in found.trainee.module.parameters() if each.requires_grad)
    outcome = TrainingOutcome(recipe, folder, cpu_s, learned, found.after)
    file.write_text(json.dumps(outcome.as_json(), indent=1) + "\n")
    return outcome


def _shipped(loaded: Loaded, states: States, draft: Path, depth: int) -> TrainingOutcome:
    recipe = Recipe(kind="draft_model", num_depths=depth, initial_draft=str(draft))
    own = _of_kind(states, loaded, recipe)
    trainee = make_trainee(recipe, loaded.parts, None, own)
    found = acceptance(trainee, loaded.parts, own, depth)
    return TrainingOutcome(recipe, draft, 0.0, sum(each.numel() for each in trainee.module.parameters()), found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="prompts of the training texts, made by models/head_prompts.py"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for texts, states and checkpoints")
    parser.add_argument("--kinds", type=_names(KINDS), default=["eagle3", "dspark"], help=", ".join(KINDS))
    parser.add_argument("--losses", type=_names(LOSSES), default=["kl", "tv", "lk", "coupled"], help=", ".join(LOSSES))
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0])
    parser.add_argument(
        "--steps", type=_steps, default={"": 120}, help="steps of all kinds, or of one: 120,draft_model=400"
    )
    parser.add_argument("--batch", type=int, default=4, help="texts per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--depth", type=int, default=3, help="trained depth in tokens")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an output, at most")
    parser.add_argument("--costs", action="store_true", help="measure step times, and report tokens per second")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the page")
    return parser.parse_args()


def _names(allowed: Sequence[str]) -> Any:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return found

    return names


def _steps(text: str) -> dict[str, int]:
    found = {"": 120}
    for part in text.split(","):
        kind, _, number = part.rpartition("=")
        found[kind] = int(number)
    return found


if __name__ == "__main__":
    main()
