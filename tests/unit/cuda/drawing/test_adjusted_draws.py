"""Several tokens in one captured graph, where penalties and the like adjust logits, are those of single steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.rows import Draw, DrawRow
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sampling.token_history import TokenHistory
from tests.support.engine.captures import Captures
from tests.support.engine.drawn_rows import (
    ADJUSTED,
    MANY,
    NUM_TOP,
    PROMPTS,
    adjusted_rows,
    logits_of,
    rows_of,
)
from tests.support.engine.triton_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares with the CPU's native call")


def single_steps(runner: ModelRunner, rows: list[DrawRow]) -> list[list[Draw]]:
    """The same draws, each from a prefill of its own and by the sampler on the CPU."""
    sampler, drawn = Sampler(runner.vocab_size, "cpu"), list[list[Draw]]()
    for line, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        output, draws = list[int](), list[Draw]()
        while len(draws) < row.num_rounds and not (output and output[-1] in row.rule.ends):
            tokens = [*prompt, *output]
            context = RowContext(row.rule.params, len(tokens), len(prompt), TokenHistory(prompt), tuple(output))
            [best] = sampler.candidates(logits_of(runner, tokens, line), [context], NUM_TOP)
            draws.append(([each.token_id for each in best], [each.score for each in best]))
            output.append(best[0].token_id)
        drawn.append(draws)
    return drawn


@pytest.mark.parametrize("adjusted", ADJUSTED, ids=[" ".join(each) for each in ADJUSTED])
def test_rows_whose_logits_are_adjusted_are_drawn_several_times_a_call_as_single_steps_draw_them(
    adjusted: dict[str, Any], runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    rows = adjusted_rows([4, 4, 3], [MANY[0], {**MANY[1], **adjusted}, {**MANY[2], **adjusted}])
    expected = single_steps(runner, rows)
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert device[0].draw(rows, logits, NUM_TOP) == expected
    assert device[0].num_passes == 3
    assert all(device[0].takes(row.rule) for row in rows)


def test_a_graph_for_adjusted_logits_serves_what_others_ask_for_and_remembers_nothing(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    drawing, captures = device
    for shift in range(3):
        many = [{**MANY[line], **ADJUSTED[(line + shift) % 4], "top_k": 0} for line in range(3)]
        rows = adjusted_rows([2, 2, 2], many)
        expected = single_steps(runner, rows)
        logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
        assert drawing.draw(rows, logits, NUM_TOP) == expected
    assert (captures.num_captured, captures.num_replayed) == (1, 3)


def test_adjusted_rows_are_drawn_once_where_nothing_can_be_captured(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    device[0].drop(for_good=True)
    rows = adjusted_rows([4, 4, 4], [{**each, **ADJUSTED[0]} for each in MANY])
    expected = single_steps(runner, rows)
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(PROMPTS)])
    assert device[0].draw(rows, logits, NUM_TOP) == [draws[:1] for draws in expected]


def test_a_row_that_does_not_tell_what_adjusts_it_is_an_error_and_so_are_bad_words(
    runner: ModelRunner, device: tuple[DeviceDrawing, Captures]
) -> None:
    for asked in ({"min_tokens": 3}, {"bad_words": ((5,),)}):
        rows = rows_of([2, 2, 2], [{**each, **asked} for each in MANY])
        with pytest.raises(ValueError, match="adjusted"):
            device[0].draw(rows, torch.zeros(3, runner.num_logits), NUM_TOP)
