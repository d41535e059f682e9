"""What a runner on a GPU chooses, played in Triton's interpreter: all that CUDA decides is said to be so."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.torch_kernels import GatherAttention
from specdec.engine.batch import Batch
from specdec.engine.cuda import buckets
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.model import building
from specdec.engine.model import runner as runner_module
from specdec.engine.model.device_choice import device_attention
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.kv_budget import largest_batch
from specdec.engine.model.ragged import StepModel
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine.captures import Captures
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.engine.triton_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU a runner chooses this without being told")


def load(
    architecture: str, folder: Path, on_gpu: bool, monkeypatch: pytest.MonkeyPatch, *, self_test: bool = False
) -> ModelRunner:
    """A self-test takes most of a load, so only tests of what it decides run one."""
    model = save_tiny_model(architecture, folder / str(on_gpu), num_layers=2)
    settings = EngineSettings(model=str(model), device="cpu", block_size=8, num_blocks=16, self_test=self_test)
    with monkeypatch.context() as patch:
        if on_gpu:
            patch.setattr(building, "is_on_gpu", lambda device: True)
        return ModelRunner.load(settings)


def test_a_model_runs_on_triton_kernels_with_the_logits_that_it_has_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load("mistral", tmp_path, True, monkeypatch, self_test=True)
    assert "triton-decoder" in runner.numerics_id
    assert not runner.row_invariant
    assert runner.num_blocks == 16
    assert runner._cache.num_blocks == 17  # one for rows of padding
    batch, _ = largest_batch(20, 20, 8, torch.device("cpu"))
    expected = load("mistral", tmp_path, False, monkeypatch).forward(batch)
    torch.testing.assert_close(runner.forward(batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("does_raise", [False, True])
def test_a_decoder_that_fails_its_self_test_is_not_used(
    does_raise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: DeviceDecoder, batch: Batch, cache: KVCache) -> torch.Tensor:
        if does_raise:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return torch.zeros(len(batch.logits_indices), 131)

    monkeypatch.setattr(DeviceDecoder, "__call__", wrong)
    assert "triton-attention" in load("llama", tmp_path, True, monkeypatch, self_test=True).numerics_id


def with_replays(steps: StepModel, cache: KVCache, max_len: int, *, is_alone: bool) -> BucketedSteps:
    return BucketedSteps(steps, cache, Captures(), max_len)


def capture_in(patch: pytest.MonkeyPatch, row_buckets: tuple[int, int]) -> None:
    """Capture steps of these sizes, and compare no larger ones, which are not replayed."""
    patch.setattr(buckets, "ROW_BUCKETS", row_buckets)
    patch.setattr(runner_module, "_WARMUP_ROWS", (2,))
    checked = tuple(rows for rows in runner_module._CHECKED_ROWS if rows <= row_buckets[-1])
    patch.setattr(runner_module, "_CHECKED_ROWS", checked)


def test_modules_of_transformers_are_replayed_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "with_replays", with_replays)
    capture_in(monkeypatch, (1, 8))
    runner = load("gemma2", tmp_path, True, monkeypatch)
    assert "triton-attention" in runner.numerics_id
    runner.warmup()
    assert runner.row_edges == (1, 8)
    batch, _ = largest_batch(5, 20, 8, torch.device("cpu"))
    expected = load("gemma2", tmp_path, False, monkeypatch).forward(batch)
    torch.testing.assert_close(runner.forward(batch), expected, rtol=1e-4, atol=1e-4)


def test_replays_of_what_was_computed_at_the_capture_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stale(Captures):
        def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            logits = run()
            return lambda: None, logits

    def stale_replays(steps: StepModel, cache: KVCache, max_len: int, *, is_alone: bool) -> BucketedSteps:
        return BucketedSteps(steps, cache, Stale(), max_len)

    monkeypatch.setattr(building, "with_replays", stale_replays)
    capture_in(monkeypatch, (1, 8))
    runner = load("gemma2", tmp_path, True, monkeypatch)
    runner.warmup()
    assert runner.row_edges == ()
    batch, _ = largest_batch(5, 20, 8, torch.device("cpu"))
    expected = load("gemma2", tmp_path, False, monkeypatch).forward(batch)
    torch.testing.assert_close(runner.forward(batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["sixteen rows", "a tree far away"])
def test_replays_that_are_wrong_for_larger_steps_only_are_found_out(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(BucketedSteps):
        def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
            logits = super().__call__(batch, cache)
            is_wrong = len(batch.input_ids) == 13 if what == "sixteen rows" else len(batch.path_slots) > 3
            return logits.flip(1) if is_wrong else logits

    def wrong_replays(steps: StepModel, cache: KVCache, max_len: int, *, is_alone: bool) -> BucketedSteps:
        return Wrong(steps, cache, Captures(), max_len)

    monkeypatch.setattr(building, "with_replays", wrong_replays)
    capture_in(monkeypatch, (1, 16))
    runner = load("gemma2", tmp_path, True, monkeypatch)
    runner.warmup()
    assert runner.row_edges == ()


def test_heads_that_are_too_wide_are_gathered() -> None:
    assert isinstance(device_attention([LayerGeometry(2, 64, 64), LayerGeometry(1, 512, 64)]), GatherAttention)
    assert not isinstance(device_attention([LayerGeometry(2, 256, 256)]), GatherAttention)
