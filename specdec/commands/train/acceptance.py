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

from specdec.commands.train.losses import coupled_given, ratio_given
from specdec.commands.train.recorded.states import States, TextBatch
from specdec.commands.train.recorded.teachers import next_token_probs
from specdec.commands.train.trainee import TargetParts, Trainee

_AT_ONCE = 4
_MOST_LOGITS = 1 << 25
"""Logits of the target that are computed at once."""


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


def acceptance(
    trainee: Trainee, target: TargetParts, states: States, num_depths: int, num_texts: int | None = None
) -> list[MeasuredAcceptance]:
    """Acceptance on the held-out texts, or on `num_texts` of each temperature; one entry per temperature."""
    temperatures = sorted({states.texts[number].temperature for number in states.numbers(held_out=True)})
    trainee.module.eval()
    return [_at(trainee, target, states, num_depths, temperature, num_texts) for temperature in temperatures]


@torch.inference_mode()
def _at(
    trainee: Trainee, target: TargetParts, states: States, num_depths: int, temperature: float, num_texts: int | None
) -> MeasuredAcceptance:
    totals = torch.zeros(2, num_depths, dtype=torch.float64)
    num_places = 0
    numbers = states.numbers(held_out=True, temperature=temperature)[:num_texts]
    for first in range(0, len(numbers), _AT_ONCE):
        batch = states.batch(numbers[first : first + _AT_ONCE], target.device)
        # Places from which a whole chain lies in the output.
        places = torch.arange(batch.token_ids.shape[1], device=target.device)[None, :]
        begun = places + trainee.lead + 1 >= batch.prompt_lengths[:, None]
        whole = begun & (places + trainee.lead + num_depths < batch.lengths[:, None])
        if not bool(whole.any()):
            continue
        taken = _taken_along(trainee, target, batch, whole, num_depths, temperature)
        totals += (taken.cumprod(1) * whole).sum((2, 3)).double().cpu()
        num_places += int(whole.sum())
    coupled, ratio = (totals / max(1, num_places)).tolist()
    return MeasuredAcceptance(temperature, num_places, coupled, ratio)


def _taken_along(
    trainee: Trainee, target: TargetParts, batch: TextBatch, whole: torch.Tensor, num_depths: int, temperature: float
) -> torch.Tensor:
    """Probabilities [2, depths, B, T] that the draft's token is the target's, coupled and by the ratio test.

    They are those of the places `whole` [B, T] and zero elsewhere.
    """
    device = target.device
    columns = columns_of(trainee, target)
    taken = torch.zeros(2, num_depths, *whole.shape, device=device)
    depths = list(trainee.guesses(batch, num_depths))
    is_needed = torch.zeros_like(whole)
    for guesses in depths:
        ahead = trainee.lead + guesses.depth
        is_needed[:, ahead:] |= whole[:, : whole.shape[1] - ahead]
    at_once = max(1, _MOST_LOGITS // target.vocab_size)
    for texts, rows in zip(*(each.split(at_once) for each in is_needed.nonzero(as_tuple=True)), strict=True):
        probs = None
        if temperature:
            probs = next_token_probs(batch.finals[texts, rows], target.lm_head, trainee.target_ids, temperature)
        for guesses in depths:
            places = rows - trainee.lead - guesses.depth
            known = (places >= 0) & whole[texts, places.clamp_min(0)]
            at = texts[known], places[known]
            wanted = columns[batch.token_ids[at[0], rows[known] + 1]]
            logits = guesses.at(*at)[0].float()
            if probs is None:
                shares = [(logits.argmax(-1) == wanted).float()] * 2
            else:
                shares = _taken(probs[known], logits / temperature, wanted)
            for way, share in enumerate(shares):
                taken[way, guesses.depth][at] = share
    return taken


def _taken(probs: torch.Tensor, logits: torch.Tensor, columns: torch.Tensor) -> list[torch.Tensor]:
    known, index = columns >= 0, columns.clamp_min(0)
    q = logits.softmax(-1)
    return [given(probs, q, index) * known for given in (coupled_given, ratio_given)]


def columns_of(trainee: Trainee, target: TargetParts) -> torch.Tensor:
    """The drafter's column of each of the target's ids [V], or -1."""
    if trainee.target_ids is None:
        return torch.arange(target.vocab_size, device=target.device)
    columns = torch.full((target.vocab_size,), -1, dtype=torch.int64, device=target.device)
    columns[trainee.target_ids] = torch.arange(len(trainee.target_ids), device=target.device)
    return columns
