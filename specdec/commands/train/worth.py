"""Tokens per second from a drafter's acceptance and step times measured on the training's machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.commands.train.acceptance import MeasuredAcceptance
from specdec.commands.train.job import Loaded
from specdec.commands.train.recipe import Recipe
from specdec.commands.train.trial import trials
from specdec.commands.tune.probe import measure
from specdec.config.drafter_options import DSparkOptions, Eagle3Options, HeadOptions, MedusaOptions
from specdec.drafting.heads.methods.registry import make_head

_CONTEXT = 256
_WARMUP, _REPEATS = 3, 15
_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Median times of one session. Lists are by the length of the chain, from 1."""

    plain_ms: float
    """Milliseconds of the target's plain step."""
    verify_ms: list[float]
    """Milliseconds of a step that verifies the chain."""
    draft_ms: list[float]
    """Milliseconds of drafting the chain before the step."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted speed with chains of one length."""

    num_draft_tokens: int
    tokens_per_step: float
    tokens_per_s: float
    speedup: float
    """Ratio to plain decoding."""


def speeds(accepted: Sequence[float], costs: StepCosts) -> list[Speed]:
    """Speeds by length of the chain: tokens of a step over the time of drafting and the step.

    `accepted` is, by depth, the share of steps that accept all tokens up to it. Time outside of steps is not counted.
    """
    found, tokens = [], 1.0
    for num, (share, verify_ms, draft_ms) in enumerate(
        zip(accepted, costs.verify_ms, costs.draft_ms, strict=False), start=1
    ):
        tokens += share
        total_ms = verify_ms + draft_ms
        found.append(Speed(num, tokens, 1e3 * tokens / total_ms, tokens * costs.plain_ms / total_ms))
    return found


def measured_costs(loaded: Loaded, recipe: Recipe, out: Path) -> StepCosts:
    """Measure the target's steps, and drafting with the checkpoint in `out`. Raises EngineError."""
    settings = loaded.runner.settings
    depths = range(1, recipe.num_depths + 1)
    target = _steps(settings.model, settings.device, settings.num_threads, [1, *(num + 1 for num in depths)])
    if recipe.kind == "draft_model":
        draft_ms = _steps(str(out), settings.device, settings.num_threads, [1])[1]
        drafts = [num * draft_ms for num in depths]
    else:
        drafts = [_draft_ms(loaded, _options(recipe, out, num), num) for num in depths]
    return StepCosts(target[1], [target[num + 1] for num in depths], drafts)


def worth_json(costs: StepCosts, results: Sequence[MeasuredAcceptance]) -> dict[str, Any]:
    """The costs, and speeds by temperature, as JSON."""
    return {
        "costs": {name: _rounded(value) for name, value in asdict(costs).items()},
        "predicted": {
            f"{each.temperature:g}": [
                {name: _rounded(value) for name, value in asdict(speed).items()}
                for speed in speeds(each.coupled, costs)
            ]
            for each in results
        },
    }


def _rounded(value: Any) -> Any:
    return [round(each, 3) for each in value] if isinstance(value, list) else round(value, 3)


def _steps(model: str, device: str, num_threads: int, rows: list[int]) -> dict[int, float]:
    task = {
        "settings": {"model": model, "device": device, "num_threads": num_threads},
        "sequences": [1],
        "rows": rows,
        "candidates": _CANDIDATES,
        "temperature": 1.0,
    }
    times: dict[int, float] = measure(task)["step_ms"][1]
    return times


def _options(recipe: Recipe, out: Path, num: int) -> HeadOptions:
    kinds: dict[str, type[HeadOptions]] = {"eagle3": Eagle3Options, "dspark": DSparkOptions, "medusa": MedusaOptions}
    return kinds[recipe.kind](model=str(out), num_speculative_tokens=num)  # type: ignore[call-arg]


def _draft_ms(loaded: Loaded, options: HeadOptions, num: int) -> float:
    """Median milliseconds in which a head reads a token and drafts a chain, with one session."""
    length = min(_CONTEXT, loaded.runner.max_model_len // 2)
    prompt = [(7 * place) % loaded.runner.vocab_size for place in range(length)]
    head = make_head(options, loaded.for_heads)
    salt = f"worth-{options.method}-{num}".encode()
    found = trials(loaded, head, prompt, _WARMUP + _REPEATS, num_drafted=num, salt=salt)
    return statistics.median([trial.elapsed_s for trial in found][_WARMUP:]) * 1e3
