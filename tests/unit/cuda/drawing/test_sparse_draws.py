"""Several tokens in one captured graph for rejection verification: those of single steps, with their distributions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.rows import DrawRow
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.noise import Purpose, uniform
from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sampling.sparse import draw_sparse, read_sparse
from specdec.engine.sampling.token_history import TokenHistory
from tests.support.engine.captures import Captures
from tests.support.engine.drawn_rows import (
    ADJUSTED,
    MANY,
    PROMPTS,
    adjusted_rows,
    logits_of,
)
from tests.support.engine.triton_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares with the CPU's native call")


NUM_SPARSE = 9
SPARSE: list[list[dict[str, Any]]] = [
    [{"temperature": 1.0}, {"temperature": 0.7, "seed": 5}, {"temperature": 0.0}],
    [{"temperature": 1.0, "top_k": 4}, {"temperature": 1.4, "top_p": 0.8}, {"temperature": 0.0}],
    [{"temperature": 1.0, **ADJUSTED[0]}, {"temperature": 1.0}, {"temperature": 0.8, "min_p": 0.3}],
]


def sparse_rows_of(rounds: list[int], many: list[dict[str, Any]]) -> list[DrawRow]:
    rows = adjusted_rows(rounds, many)
    for line, row in enumerate(rows):
        row.chain = (7 << 32) + line
    return rows


def single_samples(runner: ModelRunner, rows: list[DrawRow]) -> list[list[DraftSample | None]]:
    """The same draws, each from a prefill of its own and by the sampler on the CPU."""
    sampler, drawn = Sampler(runner.vocab_size, "cpu"), list[list[DraftSample | None]]()
    for line, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        output, samples = list[int](), list[DraftSample | None]()
        for _ in range(row.num_rounds):
            tokens = [*prompt, *output]
            context = RowContext(row.rule.params, len(tokens), len(prompt), TokenHistory(prompt), tuple(output))
            [sample] = sampler.draft_sample(logits_of(runner, tokens, line), [context], NUM_SPARSE, [row.chain])
            assert sample is not None
            samples.append(sample)
            output.append(sample.token_id)
        drawn.append(samples)
    return drawn


@pytest.mark.parametrize("many", SPARSE, ids=["plain", "cuts", "penalties"])
def test_draws_for_rejection_verification_are_those_of_single_steps_with_their_distributions(
    many: list[dict[str, Any]], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    rows = sparse_rows_of([4, 4, 3], many)
    expected = single_samples(runner, rows)
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert device[0].draw_sparse(rows, logits, NUM_SPARSE) == expected
    assert device[0].num_passes == 3
    assert device[1].num_replayed == 1
    device[0].drop(for_good=True)
    assert device[0].draw_sparse(rows, logits, NUM_SPARSE) == [samples[:1] for samples in expected]


def test_how_many_are_drawn_for_rejection_verification_does_not_depend_on_what_is_drawn(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    device[0]._mean_used = 1.0
    many = [{**each, "stop_token_ids": tuple(range(131)), "temperature": 1.0} for each in MANY]
    rows = sparse_rows_of([8, 5, 2], many)
    for row in rows:
        row.least_path_score, row.ends_all = 1.1, True
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert [len(each) for each in device[0].draw_sparse(rows, logits, NUM_SPARSE)] == [8, 5, 2]


def test_a_row_that_is_not_finite_has_no_sample_and_harms_no_other(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    for spoiled, value in ((1, math.nan), (2, math.inf), (0, math.nan)):
        rows = sparse_rows_of([3, 3, 3], SPARSE[0])
        expected = single_samples(runner, rows)
        logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
        logits[spoiled, 3] = value
        expected[spoiled] = [None]
        assert device[0].draw_sparse(rows, logits, NUM_SPARSE) == expected


def test_tokens_follow_the_distribution_that_is_told() -> None:
    """20,000 numbers of one row: chi-square with 5 degrees of freedom; a sound draw fails once in a million seeds."""
    num_draws, num_sparse = 20_000, 6
    logits = torch.tensor([[2.0, 1.0, -math.inf, 0.5, 0.5, -1.0, 1.7, -3.0]]).expand(num_draws, -1)
    points = torch.tensor([[uniform(11, 0, Purpose.DRAFT, t)] for t in range(num_draws)], dtype=torch.float64)
    samples = read_sparse(draw_sparse(logits.softmax(1), points, num_sparse))
    first = samples[0]
    assert first is not None
    assert all(each is not None and (each.ids, each.probs) == (first.ids, first.probs) for each in samples)
    assert first.ids == (0, 6, 1, 3, 4, 5), "the likeliest, ties by rising id"
    drawn = Counter(each.token_id for each in samples if each is not None)
    expected = [num_draws * prob / sum(first.probs) for prob in first.probs]
    chi_square = sum((drawn[token] - mean) ** 2 / mean for token, mean in zip(first.ids, expected, strict=True))
    assert chi_square < 35.9
