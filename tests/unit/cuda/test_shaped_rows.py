"""Rows of one sequence for measurements on a GPU are what they say: a tree's rows go on as the sequence does."""

import pytest
import torch

from bench.shaped import engine_of, random_settings, rows_of, time_steps
from specdec.engine.cuda.buckets import bucket_of
from specdec.engine.model.runner import ModelRunner

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("model")
    return ModelRunner.load(random_settings(SIZES, folder, max_model_len=256, num_blocks=40, device="cpu"))


@pytest.mark.parametrize("num_rows", [1, 2, 8, 11])
def test_rows_of_a_tree_that_are_the_sequences_own_have_its_logits(runner: ModelRunner, num_rows: int) -> None:
    whole = runner.forward(rows_of(runner, 0, 40)[0])
    batch, chain = rows_of(runner, 20, num_rows, is_tree=True)
    tree = runner.forward(batch)
    assert torch.equal(tree[chain], whole[20 : 20 + len(chain)])
    beside = [row for row in range(num_rows) if row not in chain]
    assert all((tree[row] != whole[20 : 20 + num_rows]).any(1).all() for row in beside)


def test_a_large_tree_is_a_captured_step(runner: ModelRunner) -> None:
    assert bucket_of(rows_of(runner, 100, 64, is_tree=True)[0], 17) == 64
    assert bucket_of(rows_of(runner, 100, 8, is_tree=True)[0], 17) == 8


def test_prompts_are_computed_again_for_each_measurement(runner: ModelRunner) -> None:
    engine = engine_of(runner)
    for _ in range(2):
        before = engine.stats().prefix_hit_tokens
        step_ms, prompt_ms = time_steps(engine, [64, 20], 3)
        assert engine.stats().prefix_hit_tokens == before
        assert step_ms > 0 and prompt_ms > 0
    assert engine.stats().running == 0
