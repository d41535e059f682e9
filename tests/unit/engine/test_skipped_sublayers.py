"""A model without some of its sublayers computes what transformers computes where these add nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from specdec.engine.errors import ModelLoadError
from specdec.engine.model.beside import prompt_rows
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from specdec.engine.sublayers import SkippedSublayers, read_layers, skipped_sublayers
from tests.support.engine.local_pair import MODELS, LocalPair, open_session, prompts

SETS: dict[str, tuple[dict[str, Any], SkippedSublayers]] = {
    "early exit": ({"exit_layer": 6}, SkippedSublayers(frozenset(range(6, 10)), frozenset(range(6, 10)))),
    "whole layers": (
        {"skip_attention_layers": "4-5", "skip_mlp_layers": (4, 5)},
        SkippedSublayers(frozenset({4, 5}), frozenset({4, 5})),
    ),
    "attention and MLPs": (
        {"skip_attention_layers": "9,3", "skip_mlp_layers": "2,4-5"},
        SkippedSublayers(frozenset({3, 9}), frozenset({2, 4, 5})),
    ),
}
IDS = prompts()[0][:40]


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(model=str(MODELS / "target"), num_blocks=8, **more)


def dense(skipped: SkippedSublayers) -> torch.Tensor:
    """Logits [T, V] of the whole model, of which these sublayers add nothing."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    for layer in skipped.attention:
        model.model.layers[layer].self_attn.register_forward_hook(lambda _, args, out: (torch.zeros_like(out[0]), None))
    for layer in skipped.mlp:
        model.model.layers[layer].mlp.register_forward_hook(lambda _, args, out: torch.zeros_like(out))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("path", [{}, {"fused": "off"}, {"native": "off"}], ids=["fused", "native", "torch"])
def test_what_is_left_computes_what_the_whole_model_does_when_the_others_add_nothing(
    name: str, path: dict[str, Any]
) -> None:
    more, skipped = SETS[name]
    runner = ModelRunner.load(settings(**more, **path))
    logits = runner.forward(prompt_rows(IDS, runner.block_size).batch(runner.device))
    torch.testing.assert_close(logits, dense(skipped), rtol=1e-4, atol=1e-4)
    assert runner.row_invariant
    whole = ModelRunner.load(settings(**path, self_test=False))
    assert runner.num_parameters < whole.num_parameters
    assert runner.identity.weights_digest != whole.identity.weights_digest


def test_a_model_that_says_something_else_without_them_is_refused_with_how_far_it_agrees() -> None:
    with pytest.raises(ModelLoadError, match=r"without attention 0-2, mlp 0-3 only \d% of the likeliest tokens"):
        ModelRunner.load(settings(skip_attention_layers="0-2", skip_mlp_layers="0-3"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"exit_layer": 10}, "exit_layer: 10 is not between 1 and 9"),
        ({"skip_mlp_layers": "8-11"}, "skip_mlp_layers: the model has layers 0 to 9, not 10-11"),
        ({"skip_attention_layers": "0-9"}, "skip_attention_layers: must leave at least one layer"),
    ],
)
def test_layers_that_are_not_there_are_refused_by_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelRunner.load(settings(**more))


def test_layers_are_numbers_and_ranges() -> None:
    assert read_layers(" 3-5, 8 ") == read_layers("[3,4,5,8]") == [3, 4, 5, 8]
    assert settings(skip_mlp_layers="1-2").skip_mlp_layers == (1, 2)
    assert not settings().skips_sublayers
    for wrong in ("a", "1-b", "-1"):
        with pytest.raises(ValidationError):
            settings(skip_mlp_layers=wrong)
    with pytest.raises(ValidationError, match="tensor_parallel_size"):
        settings(exit_layer=2, tensor_parallel_size=2)
    assert skipped_sublayers(4, 3, (1,), ()).left(4) == 1 - 3 / 8


def test_a_draft_of_the_targets_own_layers_changes_no_token_and_is_accepted() -> None:
    opens = {
        str(i): open_session(prompts()[i][:40], max_tokens=40, ignore_eos=True, temperature=(0.0, 0.7, 1.0)[i])
        for i in range(3)
    }
    pair = LocalPair(
        draft=str(MODELS / "target"), draft_options={"skip_attention_layers": "9", "skip_mlp_layers": "2,4-5"}
    )
    plain = pair.run(opens, use_draft=False)
    pair.reset()
    outcomes = pair.run(opens)
    assert [outcomes[key].token_ids for key in opens] == [plain[key].token_ids for key in opens]
    assert all(outcome.num_accepted > 10 for outcome in outcomes.values())
