"""`deterministic` on a GPU, played in Triton's interpreter: a token's bits are the same whatever computes it."""

from pathlib import Path

import pytest
import torch

from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.errors import ModelLoadError
from specdec.engine.model import building
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.captures import Captures
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.engine.triton_device import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has this for a GPU"),
    pytest.mark.usefixtures("ordered_products"),
]

TOKENS = play.random_tokens(13, 5, VOCAB_SIZE)
WRONG = play.random_tokens(4, 6, VOCAB_SIZE)
OTHERS = [play.random_tokens(3, 10, VOCAB_SIZE)]
PROMPT = 7


def load(architecture: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> ModelRunner:
    model = save_tiny_model(architecture, folder, num_layers=2)
    base = {"model": str(model), "device": "cpu", "block_size": 8, "num_blocks": 40, "deterministic": True}
    with monkeypatch.context() as patch:
        patch.setattr(building, "is_on_gpu", lambda device: True)
        return ModelRunner.load(EngineSettings.model_validate({**base, **settings}))


def in_buckets(runner: ModelRunner) -> None:
    """Small steps padded to buckets from now on, as graphs have them."""
    steps = BucketedSteps(runner._step_model, runner._cache, Captures())
    runner._step_model = steps


def test_logits_are_equal_in_every_bit_over_rows_chunks_trees_decodes_and_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load("mistral", tmp_path, monkeypatch)
    assert runner.row_invariant
    assert "triton-ordered-decoder" in runner.numerics_id
    expected = {path: rows[0] for path, rows in play.play_alone(runner, TOKENS).items()}
    in_buckets(runner)
    compared = 0
    for log in (
        play.play_alone(runner, TOKENS, max_batch_tokens=7),
        play.play_in_batch(runner, TOKENS, OTHERS),
        play.play_decodes(runner, TOKENS, PROMPT),
        play.play_trees(runner, TOKENS, PROMPT, WRONG),
    ):
        for path in log.keys() & expected.keys():
            assert all(torch.equal(row, expected[path]) for row in log[path]), len(path)
            compared += len(log[path])
    assert compared > 2.5 * len(TOKENS)


def test_a_model_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=r"is not row-invariant here: row-invariant GPU kernels exist only"):
        load("gemma2", tmp_path, monkeypatch)


def test_a_decoder_whose_rows_differ_with_their_company_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DeviceDecoder.__call__

    def differs(self: DeviceDecoder, batch, cache):  # type: ignore[no-untyped-def]
        return whole(self, batch, cache) * (1 + 1e-6 * (len(batch.input_ids) == 1))

    monkeypatch.setattr(DeviceDecoder, "__call__", differs)
    with pytest.raises(ModelLoadError, match="is not row-invariant"):
        load("llama", tmp_path, monkeypatch)
