"""The loop: batches in an order that the seed fixes, AdamW, a cosine. Stopped and started again, it goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from specdec.commands.train.checkpoint import load_state, save_state
from specdec.commands.train.losses import confidence_loss, loss_of
from specdec.commands.train.recipe import Recipe, TrainingRefused
from specdec.commands.train.states import States, TextBatch
from specdec.commands.train.trainee import TargetParts, Trainee

_SAVE_EVERY_S = 30.0
_BETAS = (0.9, 0.95)

OnStep = Callable[[int, float], None]
"""Told how many steps are done, and the loss of the last one."""


def train(
    trainee: Trainee, target: TargetParts, states: States, recipe: Recipe, state_file: Path, on_step: OnStep
) -> None:
    """Train on the texts that are not held out.

    Goes on from `state_file`, which is written every half minute and at the end. On one machine with one number of
    threads equal recipes over equal texts give equal weights, however often the run was stopped in between. Raises
    TrainingRefused: there is no text to learn from, or the file is of another run.
    """
    numbers = states.numbers(held_out=False)
    if not numbers:
        raise TrainingRefused("there is no text to learn from: give more prompts")
    learned = [value for value in trainee.module.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=recipe.learning_rate, betas=_BETAS, weight_decay=recipe.weight_decay)
    done = load_state(state_file, trainee.module, optimizer, recipe)
    trainee.module.train()
    saved_s = time.monotonic()
    try:
        while done < recipe.num_steps:
            batch = states.batch(_chosen(numbers, recipe, done), target.device)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * rate(done, recipe)
            with torch.autocast(target.device.type, torch.bfloat16, enabled=recipe.reduced_precision):
                loss = batch_loss(trainee, target, batch, recipe)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, recipe.max_gradient_norm)
            optimizer.step()
            done += 1
            if time.monotonic() - saved_s > _SAVE_EVERY_S or done == recipe.num_steps:
                save_state(state_file, done, trainee.module, optimizer, recipe)
                saved_s = time.monotonic()
            on_step(done, float(loss.detach()))
    finally:
        trainee.module.eval()


def batch_loss(trainee: Trainee, target: TargetParts, batch: TextBatch, recipe: Recipe) -> torch.Tensor:
    """Loss of a batch, a mean over places of each depth, and over depths with falling weights.

    A head that says how sure it is learns that beside its tokens, with the same weight.
    """
    probs = target_probs(trainee, target, batch, 1.0)
    total, weights = batch.finals.new_zeros(()), 0.0
    for guesses in trainee.guesses(batch, recipe.num_depths):
        row = torch.arange(guesses.logits.shape[1], device=target.device) + trainee.lead + guesses.depth
        known = row[None, :] < batch.lengths[:, None]
        places, rows = known.nonzero(as_tuple=True)
        if not len(places):
            continue
        wanted, logits = probs[places, row[rows]], guesses.logits[known]
        loss = loss_of(recipe.loss, wanted, logits).mean()
        if guesses.confidence is not None:
            loss = loss + confidence_loss(guesses.confidence[known], wanted, logits).mean()
        weight = recipe.depth_decay**guesses.depth
        total, weights = total + weight * loss, weights + weight
    return total / max(weights, 1e-9)


def target_probs(trainee: Trainee, target: TargetParts, batch: TextBatch, temperature: float) -> torch.Tensor:
    """The target's probabilities [B, T, D] of the token after each, of those tokens that the drafter can name."""
    with torch.no_grad():
        probs = ((batch.finals @ target.lm_head.T).float() / temperature).softmax(-1)
        return probs if trainee.target_ids is None else probs[..., trainee.target_ids]


def rate(step: int, recipe: Recipe) -> float:
    """Of the learning rate: up in a line, then down along a cosine."""
    warmup = max(1, round(recipe.warmup_share * recipe.num_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, recipe.num_steps - warmup)))


def _chosen(numbers: list[int], recipe: Recipe, step: int) -> list[int]:
    """Texts of a step: each once in an epoch, in an order that seed and epoch alone decide."""
    size = min(recipe.batch_sequences, len(numbers))
    per_epoch = len(numbers) // size
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch))
    return [numbers[each] for each in order[place * size : (place + 1) * size].tolist()]
