"""Padding to buckets: rows keep their bits whatever pads them, and few captured steps serve many shapes of batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.launches import LaunchCounter
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.cuda.buckets import ROW_BUCKETS, BucketedSteps, PassShape, bucket_of, fill, table_blocks
from specdec.engine.cuda.passes import CAPTURE_BYTES
from specdec.engine.cuda.sampling import launch_scores, launch_top
from specdec.engine.model.kv_budget import largest_batch
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from specdec.engine.tap import FINAL, HiddenTap
from tests.support.engine import paged_scenarios as play
from tests.support.engine.captures import Captures
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model


class Allocations(TorchDispatchMode):
    """Notes every tensor that an operation makes: its name and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {arg.untyped_storage()._cdata for arg in [*args, *(kwargs or {}).values()] if torch.is_tensor(arg)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if torch.is_tensor(tensor) and tensor.numel() and tensor.untyped_storage()._cdata not in known:
                self.made.append((func.__name__, tensor.untyped_storage().nbytes()))
        return result


TOKENS = play.random_tokens(45, 1, VOCAB_SIZE)
WRONG = play.random_tokens(9, 3, VOCAB_SIZE)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    model = save_tiny_model("llama", tmp_path)
    return ModelRunner.load(EngineSettings(model=str(model), device="cpu", block_size=8, num_blocks=40))


def bucketed(runner: ModelRunner, max_len: int | None = None) -> tuple[BucketedSteps, Captures]:
    """The runner's own model in buckets; the last block of its cache is given to nobody."""
    captures = Captures()
    steps = BucketedSteps(runner._step_model, runner._cache, captures, max_len)
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
    large, _ = largest_batch(ROW_BUCKETS[-1] + 1, 64, 8, torch.device("cpu"))
    assert bucket_of(large, 40) is None
    assert steps(large, runner._cache).shape == (ROW_BUCKETS[-1] + 1, VOCAB_SIZE)
    assert captures.num_captured == 1


def test_where_capturing_fails_steps_run_as_they_are(runner: ModelRunner) -> None:
    class Failing(Captures):
        def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            self.num_captured += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    batch, _ = largest_batch(5, 64, 8, torch.device("cpu"))
    expected = runner.forward(batch)
    failing = Failing()
    steps = BucketedSteps(runner._step_model, runner._cache, failing)
    assert torch.equal(steps(batch, runner._cache), expected)
    assert torch.equal(steps(batch, runner._cache), expected)
    assert torch.equal(steps(batch, runner._cache), expected)
    assert steps.row_edges == ()
    assert torch.equal(steps(batch, runner._cache), expected)
    assert failing.num_captured == 3


@pytest.mark.parametrize(("num_rows", "max_model_len"), [(1, 1), (3, 1), (5, 64), (7, 3), (8, 3), (8, 1), (100, 30)])
def test_a_batch_is_in_its_bucket_as_it_was_and_padding_is_apart(num_rows: int, max_model_len: int) -> None:
    spare_block = 90
    batch, _ = largest_batch(num_rows, max_model_len, 8, torch.device("cpu"))
    batch.path_slots = torch.arange(num_rows, dtype=torch.int32) + 5
    batch.path_offsets = torch.arange(num_rows + 1, dtype=torch.int32)
    rows = bucket_of(batch, 64)
    assert rows is not None
    assert (rows in ROW_BUCKETS, rows >= num_rows, rows < 2 * num_rows) == (True, True, True)
    shape = PassShape(64, spare_block, 8, torch.device("cpu"))
    static, padding = shape.empty_batch(rows), shape.empty_batch(rows)
    for earlier in (rows, num_rows):  # what a fuller batch has left is overwritten, or not read
        if earlier > num_rows:
            fill(static, largest_batch(earlier, 1, 8, torch.device("cpu"))[0], padding)
    fill(static, batch, padding)
    for name in ("input_ids", "position_ids", "slot_mapping", "row_seq", "context_lens", "path_slots", "path_offsets"):
        own = getattr(batch, name)
        assert torch.equal(getattr(static, name)[: len(own)], own), name
    width = batch.block_tables.shape[1]
    assert torch.equal(static.block_tables[: batch.num_seqs, :width], batch.block_tables)
    padding = slice(num_rows, None)
    assert set(static.slot_mapping[padding].tolist()) <= {spare_block * 8}
    assert set(static.row_seq[padding].tolist()) <= {rows - 1}
    assert set(static.context_lens[padding].tolist()) <= {1}
    assert set(static.position_ids[padding].tolist()) <= {0}
    assert static.path_offsets[num_rows:].tolist() == [num_rows] * (rows - num_rows + 1)
    if rows > num_rows:
        assert static.block_tables[-1, 0] == spare_block


def test_a_batch_is_copied_into_its_bucket_by_four_launches() -> None:
    meta = torch.device("meta")
    batch, _ = largest_batch(5, 64, 16, meta)
    static, padding = (PassShape(64, 9, 16, meta).empty_batch(8) for _ in range(2))
    with LaunchCounter() as counter:
        fill(static, batch, padding)
    assert [name for name, _ in counter.operations] == ["_foreach_copy_", "_foreach_copy_", "fill_", "copy_"]


def test_what_sequences_may_need_is_captured_before_the_first_one_is_there(runner: ModelRunner) -> None:
    steps, captures = bucketed(runner)
    runner.replays = steps
    runner.warmup()
    assert captures.num_captured == steps.num_graphs == len(ROW_BUCKETS)
    assert runner.row_edges == ROW_BUCKETS
    scenarios(runner)
    assert captures.num_captured == len(ROW_BUCKETS)
    assert captures.num_replayed > 20


def test_one_graph_for_each_bucket_of_rows_serves_contexts_of_any_length(runner: ModelRunner) -> None:
    _, captures = bucketed(runner, max_len=1)
    widest = table_blocks(1, 8)
    for num_blocks in (1, 9, widest, widest + 1):
        for num_rows in (1, 3):
            batch, _ = largest_batch(num_rows, 64, 8, torch.device("cpu"))
            batch.block_tables = torch.nn.functional.pad(batch.block_tables, (0, num_blocks - 1))
            assert runner.forward(batch).shape == (num_rows, VOCAB_SIZE)
    assert captures.num_captured == 2
    assert captures.num_replayed == 6, "a table that is longer than captured ones"


def test_captures_end_where_time_or_memory_does_and_go_on_when_a_shape_is_met(runner: ModelRunner) -> None:
    steps, captures = bucketed(runner)
    now_s = iter([0.0, 1.0, 9.0, 21.0, 22.0])
    steps.prepare(clock=lambda: next(now_s))
    assert captures.num_captured == 2
    runner.forward(largest_batch(1, 64, 8, torch.device("cpu"))[0])
    assert captures.num_captured == 3
    large = BucketedSteps(steps.forward, runner._cache, Captures(bytes_each=CAPTURE_BYTES // 2))
    large.prepare()
    assert large.num_graphs == 3


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


def test_what_was_captured_before_leaves_less_time_for_more(runner: ModelRunner) -> None:
    steps, _ = bucketed(runner)
    now_s = iter([0.0, *[12.0] * 50])
    steps.prepare(clock=lambda: next(now_s))
    assert steps.capture.has_room(7.0)
    assert not steps.capture.has_room(9.0)


def test_a_steady_step_makes_nothing_but_its_logits_and_what_sampling_writes() -> None:
    meta, vocab_size = torch.device("meta"), 128256
    cache = KVCache([LayerGeometry(2, 16, 16)], 40, 16, torch.bfloat16, meta)
    logits = torch.empty(4, vocab_size, device=meta)
    steps = BucketedSteps(lambda batch, cache: logits, cache, Captures())
    batch, keys = largest_batch(3, 64, 16, meta)[0], torch.empty(3, 2, dtype=torch.int32, device=meta)
    numbers = torch.empty(3, 5, dtype=torch.float64, device=meta)
    steps(batch, cache)
    made = []
    for _ in range(3):
        with Allocations() as allocations:
            launch_top(launch_scores(steps(batch, cache), numbers, (False, False)), numbers, keys, 4)
        made.append(allocations.made)
    assert made[0] == made[1] == made[2], "what one step gives back fits the next one"
    assert made[0][0] == ("index_select.default", 3 * vocab_size * 4)
    large = [name for name, num_bytes in made[0][1:] if num_bytes >= 3 * vocab_size]
    assert large == ["sub.Tensor", "lt.Tensor"], "scores, and what is cut"
