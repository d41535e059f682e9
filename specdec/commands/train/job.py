"""A whole training run: texts, hidden states, the loop, the checkpoint and its acceptance."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from specdec.commands.train.acceptance import MeasuredAcceptance, acceptance
from specdec.commands.train.kinds.draft_model import DraftModelTrainee
from specdec.commands.train.kinds.dspark import DSparkTrainee
from specdec.commands.train.kinds.eagle3 import Eagle3Trainee
from specdec.commands.train.kinds.medusa import MedusaTrainee
from specdec.commands.train.loop import OnStep, train
from specdec.commands.train.pace import Pace, Seldom
from specdec.commands.train.recipe import Recipe, TrainingRefused
from specdec.commands.train.recorded.states import States, check_logits, record_states
from specdec.commands.train.recorded.teachers import record_teachers
from specdec.commands.train.recorded.texts import Tell, Text
from specdec.commands.train.trainee import TargetParts, Trainee
from specdec.drafting.heads.target import HeadTarget
from specdec.engine.block_pool import BlockPool
from specdec.engine.checkpoints.files import find_model_files
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.scheduler import Scheduler
from specdec.engine.settings import EngineSettings

_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_MOST_PRIMITIVES = "32"
"""Number of products that oneDNN keeps prepared: in bfloat16 each takes megabytes, and each length has its own."""
_SAMPLED_TEXTS = 8
_MEASURE_EVERY_S = 60.0
_MEASURED_TEXTS = 4
"""Held-out texts of each temperature from which acceptance is told during the training."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target for training: its engine, and the weights that drafters share."""

    runner: ModelRunner
    engine: Engine
    parts: TargetParts

    @property
    def for_heads(self) -> HeadTarget:
        """The target as heads use it."""
        runner = self.runner
        sampler = Sampler(runner.vocab_size, runner.device, native=runner.native_sampling)
        return HeadTarget(runner, self.engine, sampler)


def load_target(model: str, device: str, num_threads: int) -> Loaded:
    """Load a target. Raises EngineError, or HeadRefused if its files lack the embedding or the head."""
    os.environ.setdefault(_PRIMITIVES, _MOST_PRIMITIVES)  # read when the first product is prepared
    directory, _ = find_model_files(model, None)
    settings = EngineSettings(model=model, device=device, num_threads=num_threads)
    runner = ModelRunner.load(settings)
    pool = BlockPool(runner.num_blocks, runner.block_size)
    scheduler = Scheduler(
        pool,
        settings.rows_of_step(runner.device.type),
        settings.max_batch_seqs,
        runner.max_model_len,
        runner.session_states(),
    )
    engine = Engine(runner, pool, scheduler)
    sampler = Sampler(runner.vocab_size, runner.device, native=runner.native_sampling)
    shared = HeadTarget(runner, engine, sampler)
    config = AutoConfig.from_pretrained(directory).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    lm_head, embedding = (find(runner.hidden_size) for find in (shared.lm_head, shared.embedding))
    stored = lm_head.dtype
    return Loaded(
        runner,
        engine,
        TargetParts(
            name=directory.name if Path(model).expanduser().is_dir() else model,
            directory=directory,
            architecture=(getattr(config, "architectures", None) or [""])[0],
            lm_head=lm_head.to(runner.device).float(),
            embedding=embedding.to(runner.device).float(),
            vocab_size=lm_head.shape[0],
            num_layers=runner.num_layers,
            num_positions=shared.num_positions,
            rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-5),
            rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0),
            dtype=torch.bfloat16 if stored == torch.float32 else stored,
        ),
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a run."""

    trainee: Trainee
    before: list[MeasuredAcceptance]
    after: list[MeasuredAcceptance]
    coverage: float
    """Share of the training outputs' tokens that the drafter can propose."""

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "vocabulary_coverage": round(self.coverage, 4),
            "before": [each.as_json() for each in self.before],
            "after": [each.as_json() for each in self.after],
        }


def run(
    loaded: Loaded,
    texts: Sequence[Text],
    recipe: Recipe,
    out: Path,
    work: Path,
    tell: Tell,
    on_step: OnStep | None = None,
) -> Trained:
    """Train on texts and write the checkpoint to `out`; `work` keeps what is computed once, and the run's state.

    Raises TrainingRefused, TapRefused and EngineError.
    """
    if not any(text.is_held_out for text in texts):
        raise TrainingRefused("no held-out text: at least ten prompts are needed, or --held-out")
    check_logits(loaded.engine, loaded.runner, loaded.parts.lm_head, texts[0].prompt_ids[:64])
    states = record_states(loaded.engine, loaded.runner, texts, loaded.parts.taps(recipe), work, tell)
    return learn(loaded.parts, states, recipe, out, work, tell, on_step)


def learn(
    target: TargetParts,
    states: States,
    recipe: Recipe,
    out: Path,
    work: Path,
    tell: Tell,
    on_step: OnStep | None = None,
) -> Trained:
    """Train on recorded states of the recipe's layers; the folder `work` keeps the rest, for one run of each kind.

    Raises TrainingRefused.
    """
    target_ids, coverage = _frequent(states.texts, recipe.draft_vocab_size, target.vocab_size)
    trainee = make_trainee(recipe, target, target_ids, states)
    teachers = record_teachers(
        states,
        target.lm_head,
        trainee.target_ids,
        recipe.num_kept,
        work,
        tell,
        reduced_precision=recipe.reduced_precision,
    )
    tell("acceptance before training")
    before = acceptance(trainee, target, states, recipe.num_depths)
    pace, measurements, learnt = Pace(recipe.num_steps), Seldom(_MEASURE_EVERY_S), ""

    def after_step(done: int, loss: float) -> None:
        nonlocal learnt
        if measurements.due:
            with measurements:
                found = acceptance(trainee, target, states, recipe.num_depths, _MEASURED_TEXTS)
            learnt = "; tokens a step so far" + ",".join(
                f" {each.tokens_per_step:.2f} at temperature {each.temperature:g}" for each in found
            )
        tell(f"step {pace.at(done)}, loss {loss:.3f}{learnt}")
        if on_step is not None:
            on_step(done, loss)

    train(trainee, target, states, teachers, recipe, work / f"state-{recipe.kind}.pt", after_step)
    trainee.save(out)
    tell("acceptance after training")
    after = acceptance(trainee, target, states, recipe.num_depths)
    return Trained(trainee, before, after, coverage)


def make_trainee(recipe: Recipe, target: TargetParts, target_ids: torch.Tensor | None, states: States) -> Trainee:
    """A drafter before its first step; equal seeds give equal weights. Raises TrainingRefused."""
    ids = None if target_ids is None else target_ids.to(target.device)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        match recipe.kind:
            case "eagle3" | "dspark":
                sample = states.batch(states.numbers(held_out=False)[:_SAMPLED_TEXTS], target.device)
                if recipe.kind == "dspark":
                    return DSparkTrainee(recipe, target, ids, sample)
                return Eagle3Trainee(recipe, target, ids, sample)
            case "medusa":
                return MedusaTrainee(recipe, target, ids)
            case "draft_model":
                return DraftModelTrainee(recipe, target)


def _frequent(texts: Sequence[Text], num: int | None, vocab_size: int) -> tuple[torch.Tensor | None, float]:
    """The most frequent tokens of the training outputs, in order of their ids, and their share of these outputs."""
    if num is None or num >= vocab_size:
        return None, 1.0
    counts = Counter(token for text in texts if not text.is_held_out for token in text.output_ids)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:num]
    share = sum(counts[token] for token in ranked) / max(1, sum(counts.values()))
    return torch.tensor(sorted(ranked)), share


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Write a run's report into the folder of its checkpoint."""
    (out / "training_report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
