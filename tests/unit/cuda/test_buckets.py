"""Padding to buckets: rows keep their bits whatever pads them, and few captured steps serve many shapes of batches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.engine.cuda.buckets import ROW_BUCKETS, BucketedSteps, bucket_of, empty_batch
from specdec.engine.model.kv_budget import largest_batch
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from specdec.engine.tap import FINAL, HiddenTap
from tests.support.engine import paged_scenarios as play
from tests.support.engine.captures import Captures
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model

TOKENS = play.random_tokens(45, 1, VOCAB_SIZE)
WRONG = play.random_tokens(9, 3, VOCAB_SIZE)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    model = save_tiny_model("llama", tmp_path)
    return ModelRunner.load(EngineSettings(model=str(model), device="cpu", block_size=8, num_blocks=40))


def bucketed(runner: ModelRunner) -> tuple[BucketedSteps, Captures]:
    """The runner's own model in buckets; the last block of its cache is given to nobody."""
    captures = Captures()
    steps = BucketedSteps(runner._step_model, captures)
    steps.serve(runner._cache)
    runner._step_model = steps
    runner.num_blocks -= 1
    return steps, captures


def scenarios(runner: ModelRunner) -> list[play.Log]:
    return [
        play.play_trees(runner, TOKENS, 21, WRONG),
        play.play_decodes(runner, TOKENS, 21),
        play.play_in_batch(runner, TOKENS[:19], [WRONG, TOKENS[3:10]]),
        play.play_rollback(runner, TOKENS, 21, WRONG),
    ]


def test_rows_have_the_same_bits_in_a_bucket_as_without(runner: ModelRunner) -> None:
    expected = scenarios(runner)
    _, captures = bucketed(runner)
    for log, want in zip(scenarios(runner), expected, strict=True):
        assert log.keys() == want.keys()
        for path, rows in log.items():
            assert all(torch.equal(row, want[path][0]) for row in rows), path
    assert captures.num_replayed > 3 * captures.num_captured


def test_steps_of_one_shape_are_captured_once_and_large_ones_never(runner: ModelRunner) -> None:
    steps, captures = bucketed(runner)
    for num_rows in (5, 6, 7):
        batch, _ = largest_batch(num_rows, 64, 8, torch.device("cpu"))
        assert steps(batch, runner._cache).shape == (num_rows, VOCAB_SIZE)
    assert (captures.num_captured, captures.num_replayed, steps.num_graphs) == (1, 3, 1)
    large, _ = largest_batch(65, 64, 8, torch.device("cpu"))
    assert bucket_of(large) is None
    assert steps(large, runner._cache).shape == (65, VOCAB_SIZE)
    assert captures.num_captured == 1


def test_where_capturing_fails_steps_run_as_they_are(runner: ModelRunner) -> None:
    num_tried = 0

    def fail(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        nonlocal num_tried
        num_tried += 1
        raise RuntimeError("operation not permitted when stream is capturing")

    batch, _ = largest_batch(5, 64, 8, torch.device("cpu"))
    expected = runner.forward(batch)
    steps = BucketedSteps(runner._step_model, fail)
    steps.serve(runner._cache)
    assert torch.equal(steps(batch, runner._cache), expected)
    assert torch.equal(steps(batch, runner._cache), expected)
    assert num_tried == 1


def test_a_batch_fits_its_bucket_with_a_sequence_for_the_padding() -> None:
    for num_rows in range(1, ROW_BUCKETS[-1] + 1):
        for max_model_len in (1, 3, 64):
            batch, _ = largest_batch(num_rows, max_model_len, 8, torch.device("cpu"))
            key = bucket_of(batch)
            assert key is not None
            rows, seqs, blocks, slots = key
            assert rows >= num_rows
            assert seqs >= batch.num_seqs + (rows > num_rows)
            assert (blocks, slots) == (8, 0)
            assert empty_batch(key, torch.device("cpu"), 9).slot_mapping.shape == (rows,)


def test_a_replayed_step_hands_out_hidden_states_of_its_own_rows_that_the_next_one_leaves_alone(
    runner: ModelRunner,
) -> None:
    batches = [largest_batch(num_rows, 64, 8, torch.device("cpu"))[0] for num_rows in (5, 7, 6)]
    batches[1].input_ids += 3
    expected = []
    for batch in batches:
        batch.tap = HiddenTap((FINAL, 1))
        runner.forward(batch)
        expected.append(batch.tap.states)
        batch.tap = HiddenTap((FINAL, 1))
    _, captures = bucketed(runner)
    for batch in batches:
        runner.forward(batch)
    for batch, states in zip(batches, expected, strict=True):
        assert batch.tap is not None
        assert batch.tap.states is not None
        assert states is not None
        assert torch.equal(batch.tap.states, states)
    assert captures.num_captured == 1
