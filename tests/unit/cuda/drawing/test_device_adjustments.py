"""Bias, penalties, min_tokens and allowed tokens on the device: logits are the CPU's, to the bit, draw after draw."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.launches import LaunchCounter
from specdec.engine.drawing.uploads import Adjustments
from specdec.engine.sampling.logit_processors import RowContext, adjusted_logits
from specdec.engine.sampling.token_history import TokenHistory
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.triton_device import DEVICE

EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
VOCAB = 37
PROMPT, OUTPUT = [1, 2, 2, 5, 30], [2, 6, 6, 6]
EVERYTHING: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"logit_bias": {3: 2.5, 6: -100.0, 36: 1e-3}},
    {"min_tokens": 6, "stop_token_ids": (2, 9), "eos_token_ids": (4,)},
    {"allowed_token_ids": (2, 4, 6, 8, 35)},
    {
        "repetition_penalty": 0.8,
        "logit_bias": {2: 1.0},
        "min_tokens": 5,
        "eos_token_ids": (2,),
        "presence_penalty": 0.1,
    },
]


def params_of(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 3, **options})


def context_of(params: SamplingParams, output: list[int], extra: tuple[int, ...] = ()) -> RowContext:
    history = TokenHistory(PROMPT)
    history.append(output)
    position = len(PROMPT) + len(output) + len(extra)
    return RowContext(params, position, len(PROMPT), history, extra)


def equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit by bit, except that zero has no sign and NaN and plus infinity are alike."""
    is_spoiled = expected.isnan() | (expected == math.inf)
    bits = torch.where(is_spoiled, 1.0, got + 0.0).view(torch.int32)
    return bool((got[is_spoiled].isnan() | (got[is_spoiled] == math.inf)).all()) and torch.equal(
        bits, torch.where(is_spoiled, 1.0, expected + 0.0).view(torch.int32)
    )


def compare(contexts: list[RowContext], logits: list[torch.Tensor], drawn: list[list[int]]) -> None:
    """Draw after draw, of which `drawn` says what comes of them."""
    adjustments = Adjustments(len(contexts) + 1, logits[0].shape[1], torch.device(DEVICE))
    adjustments.fill(contexts)
    for number, each in enumerate(logits):
        got = adjustments.adjusted(each.to(DEVICE), number).cpu()
        assert equal(got, adjusted_logits(each, contexts)), number
        if number < len(drawn):
            adjustments.count(torch.tensor(drawn[number], device=DEVICE))
            contexts = [
                context._replace(position=context.position + 1, extra_tokens=(*context.extra_tokens, token))
                for context, token in zip(contexts, drawn[number], strict=True)
            ]


def noisy(num_rows: int, num: int, vocab_size: int = VOCAB) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(num_rows, vocab_size, generator=generator) * 5 for _ in range(num)]


def test_rows_of_all_kinds_are_adjusted_as_on_the_cpu_for_as_many_draws_as_a_graph_has() -> None:
    contexts = [context_of(params_of(**each), OUTPUT, (7, 2)) for each in EVERYTHING]
    drawn = [[(3 * number + row) % 9 for row in range(len(contexts))] for number in range(7)]
    compare(contexts, noisy(len(contexts), 8), drawn)


def test_tensors_are_used_again_and_remember_nothing() -> None:
    adjustments = Adjustments(8, VOCAB, torch.device(DEVICE))
    [logits] = noisy(len(EVERYTHING), 1)
    for shift in range(3):
        contexts = [context_of(params_of(**each), OUTPUT) for each in (*EVERYTHING[shift:], *EVERYTHING[:shift])]
        adjustments.fill(contexts)
        adjustments.count(torch.full((8,), 11, device=DEVICE))
        adjustments.fill(contexts)
        assert equal(adjustments.adjusted(logits.to(DEVICE), 0).cpu(), adjusted_logits(logits, contexts))


def test_columns_and_ids_past_the_vocabulary_are_left_out() -> None:
    params = params_of(repetition_penalty=1.1, logit_bias={0: 1.0, 1023: 1.0, 1024: -1.0, 2047: 3.0, 99_999: 4.0})
    contexts = [context_of(params, [1024, 2046]), context_of(params_of(), [])]
    padded = torch.randn(2, 2100, generator=torch.Generator().manual_seed(2))
    compare(contexts, [padded[:, :2048]], [])


@EXAMPLES
@given(data=st.data())
def test_any_row_is_adjusted_as_on_the_cpu(data: st.DataObject) -> None:
    numbers = st.sampled_from(
        (0.0, -0.0, 1.0, -1.5, 30.0, 3.4e38, -3.4e38, 1e-45, -1e-45, math.inf, -math.inf, math.nan)
    )
    ids = st.integers(0, VOCAB + 2)
    penalty = st.sampled_from((1.0, 1e-30, 0.5, 1.2, 1e30))
    shift = st.sampled_from((0.0, 2.0, -2.0, 0.3))
    contexts = []
    for _ in range(data.draw(st.integers(1, 3))):
        params = params_of(
            repetition_penalty=data.draw(penalty),
            presence_penalty=data.draw(shift),
            frequency_penalty=data.draw(shift),
            logit_bias=data.draw(st.dictionaries(ids, st.sampled_from((100.0, -100.0, 1e-3, 1e-45)), max_size=4)),
            min_tokens=data.draw(st.sampled_from((0, 1, 4, 2**31 - 1))),
            stop_token_ids=tuple(data.draw(st.lists(ids, max_size=3))),
            allowed_token_ids=tuple(data.draw(st.one_of(st.just([]), st.lists(ids, min_size=1, max_size=5)))),
        )
        output = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        contexts.append(context_of(params, output, tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)))))
    rows = st.lists(st.lists(numbers, min_size=VOCAB, max_size=VOCAB), min_size=len(contexts), max_size=len(contexts))
    logits = [torch.tensor(data.draw(rows), dtype=torch.float64).to(torch.float32) for _ in range(2)]
    drawn = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(contexts), max_size=len(contexts)))
    compare(contexts, logits, [drawn])


def test_a_history_that_does_not_end_at_the_position_is_an_error() -> None:
    context = context_of(params_of(presence_penalty=1.0), OUTPUT)
    adjustments = Adjustments(1, VOCAB, torch.device(DEVICE))
    for wrong in (context._replace(history=None), context._replace(position=context.position + 1)):
        with pytest.raises(ValueError, match="history"):
            adjustments.fill([wrong])


def test_a_draw_is_adjusted_by_some_operations_and_counted_by_five_small_ones_and_nothing_waits() -> None:
    meta = torch.device("meta")
    adjustments = Adjustments(8, 150_000, meta)
    with LaunchCounter() as counter:
        adjusted = adjustments.adjusted(torch.empty(8, 150_000, device=meta), 1)
        adjustments.count(torch.empty(8, dtype=torch.int64, device=meta))
    assert len(counter.operations) == 21 + 5
    assert adjusted.shape == (8, 150_000)
