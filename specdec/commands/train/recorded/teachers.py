"""The target's likeliest next tokens along all texts, with their probabilities: computed once, read by every step.

A step then costs nothing that grows with the target's vocabulary. The probability of all other tokens that the drafter
can propose is kept as one number, the rest.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.commands.train.pace import Pace
from specdec.commands.train.recorded.mapped import MappedTensors, digest_of_texts
from specdec.commands.train.recorded.states import States
from specdec.commands.train.recorded.texts import Tell

_MOST_LOGITS = 1 << 25
"""Logits that are computed at once."""


@dataclass(frozen=True, slots=True)
class TaughtBatch:
    """Of the next token after each token of a batch, at temperature 1."""

    columns: torch.Tensor
    """[B, T, M] int64: columns of the drafter's vocabulary that hold the likeliest tokens."""
    probs: torch.Tensor
    """[B, T, M + 1]: their probabilities, and that of the drafter's other columns together."""


@dataclass(frozen=True, slots=True)
class Teachers:
    """The probabilities along the texts that are learned from."""

    columns: torch.Tensor
    """[tokens of all texts, M] int32, a mapped file."""
    probs: torch.Tensor
    """[tokens of all texts, M + 1] float32, a mapped file."""
    starts: list[int]

    def batch(self, numbers: Sequence[int], device: torch.device) -> TaughtBatch:
        """Those of the texts with these numbers, padded at the end."""
        spans = [slice(self.starts[number], self.starts[number + 1]) for number in numbers]
        longest = max(span.stop - span.start for span in spans)
        columns = torch.zeros(len(spans), longest, self.columns.shape[1], dtype=torch.int64)
        probs = torch.zeros(len(spans), longest, self.probs.shape[1])
        for place, span in enumerate(spans):
            columns[place, : span.stop - span.start] = self.columns[span]
            probs[place, : span.stop - span.start] = self.probs[span]
        return TaughtBatch(columns.to(device), probs.to(device))


def record_teachers(
    states: States,
    lm_head: torch.Tensor,
    target_ids: torch.Tensor | None,
    num_kept: int,
    folder: Path,
    tell: Tell,
    *,
    reduced_precision: bool = False,
) -> Teachers:
    """Probabilities along all texts but held-out ones, from the files of an earlier call as far as it came.

    `lm_head`: [V, Ht], on the training's device; `target_ids`: see `Trainee`; `num_kept`: M, unless the drafter has
    fewer tokens. Cost: a product with `lm_head` for each token; on disk 8 M bytes per token.
    """
    device = lm_head.device
    size = lm_head.shape[0] if target_ids is None else len(target_ids)
    width, num_tokens = min(num_kept, size), states.starts[-1]
    layout = {"columns": ((num_tokens, width), torch.int32), "probs": ((num_tokens, width + 1), torch.float32)}
    origin = {"texts": digest_of_texts(states.texts), "tokens": _digest(target_ids), "in_bfloat16": reduced_precision}
    kept = MappedTensors(folder, "teachers", layout, origin)
    columns, probs = kept.tensors["columns"], kept.tensors["probs"]
    pace = Pace(len(states.texts))
    for number in kept.unfilled(len(states.texts)):
        if states.texts[number].is_held_out:
            continue
        tell(f"the target's probabilities: text {pace.at(number)}")
        starts = range(states.starts[number], states.starts[number + 1], max(1, _MOST_LOGITS // lm_head.shape[0]))
        for first, last in itertools.pairwise([*starts, states.starts[number + 1]]):
            finals = states.rows[first:last, -1].to(device).float()
            with torch.autocast(device.type, torch.bfloat16, enabled=reduced_precision):
                known = next_token_probs(finals, lm_head, target_ids)
            best, chosen = _likeliest(known, width)
            columns[first:last], probs[first:last, :-1] = chosen.to("cpu", torch.int32), best.to("cpu")
            probs[first:last, -1] = (known.sum(-1) - best.sum(-1)).clamp_min(0).to("cpu") if width < size else 0.0
    return Teachers(columns, probs, states.starts)


@torch.no_grad()
def next_token_probs(
    finals: torch.Tensor, lm_head: torch.Tensor, target_ids: torch.Tensor | None, temperature: float = 1.0
) -> torch.Tensor:
    """The target's probabilities [R, D] after final states [R, Ht], for the tokens that the drafter can propose."""
    probs = ((finals @ lm_head.T).float() / temperature).softmax(-1)
    return probs if target_ids is None else probs[:, target_ids]


def _likeliest(probs: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` greatest of each row [R, num] and their columns, in no order."""
    if num == probs.shape[1]:
        return probs, torch.arange(num, device=probs.device).expand_as(probs)
    best, columns = probs.topk(num, sorted=False)
    return best, columns


def _digest(target_ids: torch.Tensor | None) -> str | None:
    if target_ids is None:
        return None
    return hashlib.blake2b(target_ids.cpu().numpy().tobytes(), digest_size=16).hexdigest()
