"""Acceptance of a drafter by depth, over held-out texts.

A chain is accepted up to depth k if every token of it is. Along the target's own text that has a probability: in
coupled verification the product of the probabilities that the draft draws the target's token, given that token; in the
ratio test the product of those that the token comes from the draft. Their mean over places is the acceptance in
serving.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.commands.train.loop import target_probs
from specdec.commands.train.losses import coupled_given, ratio_given
from specdec.commands.train.states import States
from specdec.commands.train.trainee import TargetParts, Trainee

_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """Acceptance at one temperature. Lists are by depth."""

    temperature: float
    num_places: int
    coupled: list[float] = field(default_factory=list)
    """Share of places from which all tokens up to this depth are accepted, in coupled verification."""
    ratio: list[float] = field(default_factory=list)
    """The same share by the ratio test, token by token; equal to `coupled` at temperature 0."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of coupled verification with the longest chain, the target's own token included."""
        return 1 + sum(self.coupled)

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "temperature": self.temperature,
            "num_places": self.num_places,
            "coupled": [round(value, 4) for value in self.coupled],
            "ratio_test": [round(value, 4) for value in self.ratio],
            "tokens_per_step": round(self.tokens_per_step, 3),
        }


def acceptance(trainee: Trainee, target: TargetParts, states: States, num_depths: int) -> list[MeasuredAcceptance]:
    """Acceptance on the held-out texts, one entry per temperature."""
    temperatures = sorted({states.texts[number].temperature for number in states.numbers(held_out=True)})
    trainee.module.eval()
    return [_at(trainee, target, states, num_depths, temperature) for temperature in temperatures]


@torch.inference_mode()
def _at(
    trainee: Trainee, target: TargetParts, states: States, num_depths: int, temperature: float
) -> MeasuredAcceptance:
    coupled, ratio = torch.zeros(num_depths, dtype=torch.float64), torch.zeros(num_depths, dtype=torch.float64)
    num_places = 0
    columns = columns_of(trainee, target)
    numbers = states.numbers(held_out=True, temperature=temperature)
    for first in range(0, len(numbers), _AT_ONCE):
        batch = states.batch(numbers[first : first + _AT_ONCE], target.device)
        length = batch.token_ids.shape[1]
        # Places from which a whole chain lies in the output.
        places = torch.arange(length, device=target.device)[None, :]
        begun = places + trainee.lead + 1 >= batch.prompt_lengths[:, None]
        whole = begun & (places + trainee.lead + num_depths < batch.lengths[:, None])
        if not bool(whole.any()):
            continue
        probs = target_probs(trainee, target, batch, temperature or 1.0)
        survived = [torch.ones_like(whole, dtype=torch.float32) for _ in range(2)]
        for guesses in trainee.guesses(batch, num_depths):
            ahead = trainee.lead + guesses.depth
            num = min(guesses.logits.shape[1], length - 1 - ahead)
            wanted = columns[batch.token_ids[:, ahead + 1 : ahead + 1 + num]]
            taken = _taken(
                probs[:, ahead : ahead + num].flatten(0, 1),
                guesses.logits[:, :num].flatten(0, 1).float(),
                wanted.flatten(),
                temperature,
            )
            for mine, share, total in zip(survived, taken, (coupled, ratio), strict=True):
                mine[:, :num] *= share.view(-1, num)
                total[guesses.depth] += mine[whole].sum().double().cpu()
        num_places += int(whole.sum())
    size = max(1, num_places)
    return MeasuredAcceptance(temperature, num_places, (coupled / size).tolist(), (ratio / size).tolist())


def _taken(
    probs: torch.Tensor, logits: torch.Tensor, columns: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [R] that the draft's token is the target's, coupled and by the ratio test."""
    known = columns >= 0
    if temperature == 0:
        same = (logits.argmax(-1) == columns).float()
        return same, same
    index = columns.clamp_min(0)
    q = (logits / temperature).softmax(-1)
    return coupled_given(probs, q, index) * known, ratio_given(probs, q, index) * known


def columns_of(trainee: Trainee, target: TargetParts) -> torch.Tensor:
    """The drafter's column of each of the target's ids [V], or -1."""
    if trainee.target_ids is None:
        return torch.arange(target.vocab_size, device=target.device)
    columns = torch.full((target.vocab_size,), -1, dtype=torch.int64, device=target.device)
    columns[trainee.target_ids] = torch.arange(len(trainee.target_ids), device=target.device)
    return columns
