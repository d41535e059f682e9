"""Steps of an engine over `ExactRunner`, with a check after each."""

from __future__ import annotations

from typing import Any

import torch

from specdec.engine.engine import Engine
from specdec.engine.outputs import StepOutput
from specdec.engine.sequence import Sequence
from tests.support.engine.exact_runner import assert_blocks_add_up, fresh_logits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def step(engine: Engine) -> StepOutput:
    output = engine.step()
    assert output is not None
    assert_blocks_add_up(engine)
    return output


def prefilled(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> Sequence:
    """A sequence whose prompt is computed and that has one more token pending, as a role would leave it."""
    seq = engine.add(prompt, num_prompt_tokens=len(prompt), **options)
    while engine.step() is not None:
        pass
    engine.append(seq, [7])
    return seq


def assert_next_logits_are_fresh(engine: Engine, seq: Sequence) -> None:
    """The logits after one more token are those of a fresh prefill."""
    engine.append(seq, [8])
    output = step(engine)
    while seq.num_pending_tokens:
        output = step(engine)
    [item] = [item for item in output.items if item.seq is seq]
    assert torch.equal(output.logits[item.rows][-1], fresh_logits(seq.token_ids))
