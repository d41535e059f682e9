"""Steps of the slot about a row's bits, and inputs whose results the CPU knows."""

from __future__ import annotations

import torch

from bench.gpu_slot import models
from bench.gpu_slot.models import Found, SlotModel, StepSetup, chain_rows
from specdec.engine.cuda.cuts import device_cuts
from specdec.engine.drawing.adjustments import Adjustments
from specdec.engine.sampling.logit_processors import (
    CutArguments,
    RowContext,
    adjusted_logits,
    cut_,
    temperature_scores,
)
from specdec.engine.sampling.token_history import TokenHistory
from specdec.wire.sampling_params import SamplingParams


def num_cuts_that_differ(place: StepSetup, logits: torch.Tensor) -> int:
    """Number of scores that differ between the device's and the CPU's top-k, top-p and min-p.

    ``logits``: at most 8 rows, on the host.
    """
    num_rows = len(logits)
    top_k, top_p, min_score = [0, 40] * 4, [0.9, 1.0, 0.95, 1.0] * 2, [-torch.inf, -torch.inf, -3.0, -9.0] * 2
    cuts: CutArguments = (top_k[:num_rows], top_p[:num_rows], min_score[:num_rows])
    divisors = [0.7] * num_rows
    expected = cut_(temperature_scores(logits, divisors), *cuts)
    return int((device_cuts(logits.to(place.device), divisors, cuts).cpu() != expected).sum())


def adjusting_rows(num_rows: int) -> list[RowContext]:
    """Rows with penalties, a logit bias and min_tokens."""
    params = SamplingParams(
        seed=1,
        max_tokens=99,
        temperature=1.0,
        repetition_penalty=1.05,
        frequency_penalty=0.3,
        logit_bias={7: 2.0, 2999: -100.0},
        min_tokens=2000,
        eos_token_ids=(2,),
    )
    prompt = list(range(0, 2000, 2))
    history = TokenHistory(prompt)
    history.append([3, 4, 4])
    position = len(prompt) + 3
    return [RowContext(params, position + row, len(prompt), history, (9,) * row) for row in range(num_rows)]


def num_adjusted_that_differ(place: StepSetup, logits: torch.Tensor) -> int:
    """Number of logits that differ between the device's and the CPU's bias, penalties and min_tokens."""
    rows = adjusting_rows(len(logits))
    adjustments = Adjustments(len(logits), logits.shape[1], place.device)
    adjustments.fill(rows)
    return int((adjustments.adjusted(logits.to(place.device), 0).cpu() != adjusted_logits(logits, rows)).sum())


def bitwise(place: StepSetup) -> Found:
    """Number of rows whose logits change when the same tokens are computed in chunks of another size, or in a tree.

    The 8B model's prefill attends in one pass over all splits, and its smaller steps in parts that are then merged.
    Raises AssertionError where a row differs with row-invariant products.
    """
    found: Found = {}
    for shape, length in (("1b", 24),) if place.dry else (("1b", 1536), ("8b", 4608)):
        for kind in ("fast", "deterministic"):
            model = models.make(shape, place, length + 16, row_invariant=kind == "deterministic")
            differing = _differing_rows(place, model, length)
            found |= {f"{kind}: rows in {name} that differ, {shape}": counts for name, counts in differing.items()}
            place.keep(found)
            # The interpreter's products depend on the number of rows.
            if kind == "deterministic" and not place.dry and any(counts[0] for counts in differing.values()):
                raise AssertionError(found)
            del model
    return found


def _differing_rows(place: StepSetup, model: SlotModel, length: int) -> dict[str, list[int]]:
    """Numbers of differing and of compared rows, by the way of computing them.

    The rows are a sequence's last ones, and the reference is a prefill in the longest chunks.
    """
    most, other = (24, 10) if place.dry else (512, 384)
    whole = _prefilled(model, length, most)
    first = length - most
    found = {}
    replays = models.replays_of(place, model)
    for rows in (1, 2, 7) if place.dry else (1, 2, 7, 8, 16, 64):
        starts = range(first, length - rows + 1, max(rows, most // 8))
        for how, compute in (("", model.decoder), (", replayed", replays)):
            differing = 0
            for start in starts:
                part = compute(model.rows(start, rows), model.cache)
                differing += int((part != whole[start - first : start - first + rows]).any(1).sum())
            found[f"chunks of {rows}{how}"] = [differing, rows * len(starts)]
    cut = _prefilled(model, length, other)  # in other chunks from the first token on
    found[f"a prefill in chunks of {other}"] = [int((cut != whole[most - len(cut) :]).any(1).sum()), len(cut)]
    rows = 5 if place.dry else 64
    chain, start = chain_rows(rows), length - (8 if place.dry else rows)
    expected = whole[start - first : start - first + len(chain) + 1]
    for how, compute in (("", model.decoder), (", replayed", replays)):
        tree = compute(model.tree(start, rows), model.cache)
        found[f"a tree of {rows}{how}"] = [int((tree[[0, *chain]] != expected).any(1).sum()), len(expected)]
    return found


def _prefilled(model: SlotModel, length: int, chunk: int) -> torch.Tensor:
    """Logits of the last chunk of a sequence, prefilled from its first token on."""
    logits = torch.empty(0)
    for start in range(0, length, chunk):
        logits = model.decoder(model.rows(start, min(chunk, length - start)), model.cache)
    return logits
