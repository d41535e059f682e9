"""The training loop: batches in an order fixed by the seed, AdamW, a cosine schedule; it continues after a stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from specdec.commands.train.candidates import draw_candidates
from specdec.commands.train.checkpoint import load_state, save_state
from specdec.commands.train.losses import confidence_loss, loss_of
from specdec.commands.train.pace import Seldom
from specdec.commands.train.recipe import Recipe, TrainingRefused
from specdec.commands.train.recorded.states import States, TextBatch
from specdec.commands.train.recorded.teachers import TaughtBatch, Teachers
from specdec.commands.train.trainee import TargetParts, Trainee

_SAVE_EVERY_S = 30.0
_BETAS = (0.9, 0.95)

OnStep = Callable[[int, float], None]
"""Called with the number of finished steps and the loss of the last one."""


def train(
    trainee: Trainee,
    target: TargetParts,
    states: States,
    teachers: Teachers,
    recipe: Recipe,
    state_file: Path,
    on_step: OnStep,
) -> None:
    """Train on the texts that are not held out.

    It continues from `state_file`, which is written every half minute (less often where that would take more than a
    twentieth of the time) and at the end. On one machine with one number of threads, equal recipes and texts give
    equal weights, however often the run was stopped. Raises TrainingRefused if there is no training text, or the file
    belongs to another run.
    """
    numbers = states.numbers(held_out=False)
    if not numbers:
        raise TrainingRefused("no training text: give more prompts")
    learned = [value for value in trainee.module.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=recipe.learning_rate, betas=_BETAS, weight_decay=recipe.weight_decay)
    done = load_state(state_file, trainee.module, optimizer, recipe)
    trainee.module.train()
    saves = Seldom(_SAVE_EVERY_S)
    try:
        while done < recipe.num_steps:
            chosen = _chosen(numbers, recipe, done)
            batch, taught = states.batch(chosen, target.device), teachers.batch(chosen, target.device)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate(done, recipe)
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + done)
            with torch.autocast(target.device.type, torch.bfloat16, enabled=recipe.reduced_precision):
                loss = batch_loss(trainee, target, batch, taught, recipe, generator)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, recipe.max_gradient_norm)
            optimizer.step()
            done += 1
            if saves.due or done == recipe.num_steps:
                with saves:
                    save_state(state_file, done, trainee.module, optimizer, recipe)
            on_step(done, float(loss.detach()))
            trainee.module.train()
    finally:
        trainee.module.eval()


def batch_loss(
    trainee: Trainee,
    target: TargetParts,
    batch: TextBatch,
    taught: TaughtBatch,
    recipe: Recipe,
    generator: torch.Generator,
) -> torch.Tensor:
    """Loss of a batch, a mean over places of each depth, and over depths with falling weights.

    A head's confidence is learned with the same weight as its tokens. The generator draws candidates.
    """
    size = target.vocab_size if trainee.target_ids is None else len(trainee.target_ids)
    is_text = torch.arange(batch.token_ids.shape[1], device=target.device)[None, :] < batch.lengths[:, None]
    candidates = draw_candidates(taught.columns[is_text], size, recipe.num_sampled, generator)
    total, weights = batch.finals.new_zeros(()), 0.0
    for guesses in trainee.guesses(batch, recipe.num_depths):
        ahead = trainee.lead + guesses.depth
        texts, places = is_text[:, ahead : ahead + guesses.num_places].nonzero(as_tuple=True)
        if not len(texts):
            continue
        logits, confidence = guesses.at(texts, places, candidates.columns)
        logits = candidates.kept_logits(logits, taught.columns[texts, places + ahead])
        wanted = taught.probs[texts, places + ahead, : logits.shape[1]]
        loss = loss_of(recipe.loss, wanted, logits).mean()
        if confidence is not None:
            loss = loss + confidence_loss(confidence, wanted, logits).mean()
        weight = recipe.depth_decay**guesses.depth
        total, weights = total + weight * loss, weights + weight
    return total / max(weights, 1e-9)


def rate(step: int, recipe: Recipe) -> float:
    """Share of the learning rate at a step: linear warm-up, then a cosine down to zero."""
    warmup = max(1, round(recipe.warmup_share * recipe.num_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, recipe.num_steps - warmup)))


def _chosen(numbers: list[int], recipe: Recipe, step: int) -> list[int]:
    """Texts of a step: each once per epoch, in an order fixed by seed and epoch."""
    size = min(recipe.batch_sequences, len(numbers))
    per_epoch = len(numbers) // size
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch))
    return [numbers[each] for each in order[place * size : (place + 1) * size].tolist()]
