"""Sampling on the device: the tokens and scores that the CPU has, for any rows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from bench.launches import LaunchCounter
from specdec.engine.cuda.sampling import MOST_TOP, cut_kinds, launch_scores, launch_top, start_draws
from specdec.engine.sampling.logit_processors import MIN_TEMPERATURE, RowContext, adjusted_logits, row_numbers
from specdec.engine.sampling.noise import Purpose, noise_key
from specdec.engine.sampling.perturbed_top import perturbed_top
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sampling.scored_ids import read_top, scored
from specdec.engine.sampling.token_history import TokenHistory
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.drawn_rows import numbers_of
from tests.support.engine.extreme_rows import Batch, batches
from tests.support.engine.triton_device import DEVICE

EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def keys_of(num_rows: int) -> list[int]:
    return [part for row in range(num_rows) for part in noise_key(2**64 - 1 - row, row % 3, Purpose.PLAIN, 7 * row)]


def drawn(
    logits: torch.Tensor, temperatures: list[float], keys: list[int], num_top: int
) -> tuple[list[int], list[float]]:
    numbers = numbers_of(temperatures, vocab_size=logits.shape[1])
    return read_top(start_draws(logits.to(DEVICE), numbers, keys, num_top)())


@pytest.mark.parametrize(("vocab_size", "num_top"), [(17, MOST_TOP), (1024, 1), (5003, 3)])
def test_rows_of_any_temperature_have_the_cpus_tokens_and_scores(vocab_size: int, num_top: int) -> None:
    temperatures = [0.0, 1.0, 0.7, MIN_TEMPERATURE, 100.0, 1e6]
    logits = torch.randn(len(temperatures), vocab_size, generator=torch.Generator().manual_seed(num_top)) * 4
    logits[:, 3] = logits[:, 11]  # ties go to the lower id
    keys = keys_of(len(temperatures))
    expected = perturbed_top(logits, temperatures, keys, num_top)
    assert drawn(logits, temperatures, keys, num_top) == expected


def test_noise_is_that_of_the_cpu_for_every_token() -> None:
    vocab_size = 1500  # equal logits: the best are those of the noise
    logits, keys = torch.zeros(20, vocab_size), keys_of(20)
    expected = perturbed_top(logits, [1.0] * 20, keys, 4)
    assert drawn(logits, [1.0] * 20, keys, 4) == expected


@EXAMPLES
@given(batch=batches())
def test_extreme_rows_give_what_they_give_on_the_cpu(batch: Batch) -> None:
    on_cpu = Sampler(batch.vocab_size, "cpu", native="off")
    on_device = Sampler(batch.vocab_size, "cpu", native="off")
    on_device.use_device_kernels()
    assert on_device.sample(batch.logits, batch.rows) == on_cpu.sample(batch.logits, batch.rows)
    got, expected = (sampler.candidates(batch.logits, batch.rows, 4) for sampler in (on_device, on_cpu))
    assert got == expected


def test_a_row_that_is_not_finite_is_nan_and_harms_no_other() -> None:
    logits = torch.zeros(4, 2100)
    logits[0, 2050], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    for temperature in (0.0, 1.0):
        ids, scores = drawn(logits, [temperature] * 4, keys_of(4), 2)
        assert all(math.isnan(score) for score in scores[:6])
        assert all(math.isfinite(score) for score in scores[6:])
        assert len(set(ids[6:])) == 2


def test_sampling_is_a_few_operations_and_waits_for_nothing() -> None:
    keys, numbers = (
        torch.empty(8, width, dtype=dtype, device="meta") for width, dtype in ((2, torch.int32), (5, torch.float64))
    )
    with LaunchCounter() as counter:
        scores = launch_scores(torch.empty(8, 150_000, device="meta"), numbers, (False, False))
        out = launch_top(scores, numbers, keys, 4)
    assert [launch.name for launch in counter.launches] == ["draw_kernel"]
    names = [name for name, _ in counter.operations]
    assert names == [
        "_to_copy",
        "amax",
        "mul",
        "mul",
        "sub",
        "sub",
        "div_",
        "lt",
        "masked_fill_",
        "draw_kernel",
        "topk",
    ]
    assert out.shape == (8, 4)
    scores, ids = torch.tensor([[2.5, 0.0, 0.0]]), torch.tensor([[3, 0, 2**31 - 1]])
    assert read_top(scored(scores, ids)) == ([3, 0, 2**31 - 1], [2.5, 0.0, 0.0])
    logits_bytes = 8 * 150_000 * 4
    assert sum(num_bytes for _, num_bytes in counter.operations) < logits_bytes * 9.6, "of scores, four times both ways"


def test_penalties_biases_and_cuts_wait_for_nothing_before_the_draw() -> None:
    vocab_size, history = 150_000, TokenHistory([3, 9])
    history.append([5, 5])
    params = {"seed": 1, "max_tokens": 9, "temperature": 0.8, "stop_token_ids": (7,), "min_tokens": 9}
    many: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "top_k": 40},
        {"logit_bias": {4: 2.0}, "top_p": 0.9},
        {"allowed_token_ids": (1, 2, 3), "bad_words": ((5, 3),), "min_p": 0.1},
    ]
    rows = [RowContext(SamplingParams(**params, **each), 4, 2, history) for each in many]
    numbers = row_numbers(rows, vocab_size)
    with LaunchCounter() as counter:
        adjusted = adjusted_logits(torch.empty(3, vocab_size, device="meta"), rows)
        on_device = torch.from_numpy(numbers).to("meta")
        scores = launch_scores(adjusted, on_device, cut_kinds(numbers, vocab_size))
        launch_top(scores, on_device, torch.empty(3, 2, dtype=torch.int32, device="meta"), 4)
    names = [name for name, _ in counter.operations]
    assert names.count("cut_kernel") == 18
    assert not {"nonzero", "_local_scalar_dense", "item"} & set(names)
