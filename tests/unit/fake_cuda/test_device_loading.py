"""How models are loaded, proved and captured on a GPU that is played, each test on a device of its own."""

from __future__ import annotations

from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.errors import OutOfResources

from specdec.config import DraftSettings
from specdec.engine.batch import Batch
from specdec.engine.cuda import attention
from specdec.engine.errors import ModelLoadError
from specdec.engine.model import loader
from specdec.engine.model import runner as runner_module
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.settings import EngineSettings
from specdec.replica.worker.build import build_engine, most_rows
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine import paged_scenarios as play
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.engine.triton_device import DEVICE
from tests.support.fake_cuda.install import fake_cuda
from tests.support.fake_cuda.runners import ROWS, warm_runner

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is a real one")


@pytest.mark.parametrize(
    "architecture",
    ["gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "gpt_neox", "opt", "phi3"))],
)
def test_modules_of_transformers_wait_for_nothing_inside_a_captured_step(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cuda():
        runner = warm_runner(architecture, tmp_path, monkeypatch)
        assert "triton-attention" in runner.numerics_id
        assert runner.row_edges == ROWS, "and what is replayed is what they compute"


def test_a_draft_without_some_sublayers_is_loaded_and_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LEAST_AGREEMENT", 0.0)  # of random weights
    with fake_cuda():
        runner = warm_runner("llama", tmp_path, monkeypatch, num_layers=2, skip_mlp_layers="1")
        assert "triton-decoder" in runner.numerics_id
        assert runner.row_edges == ROWS


def test_steps_with_weights_of_8_bits_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda():
        settings = {"dtype": "float16", "weight_quantization": "fp8", "self_test": False}  # CPUs have no such softmax
        runner = warm_runner("llama", tmp_path, monkeypatch, num_layers=2, **settings)
        assert "triton-decoder" in runner.numerics_id
        assert "fp8-weights" in runner.numerics_id
        assert runner.row_edges == ROWS
        decoder: Any = runner.replays.forward  # type: ignore[union-attr]
        attention_part, mlp = decoder._layers[0]
        assert attention_part.qkv.keywords["numbers"].dtype == torch.float8_e4m3fn
        assert mlp.down.keywords["weight"].shape[1] % 16, "which scaled products do not take"


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma2", marks=pytest.mark.long)])
def test_steps_over_keys_of_8_bits_are_captured_and_compute_the_cpus_logits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = play.random_tokens(5, 2, VOCAB_SIZE)
    settings = {"kv_cache_dtype": "fp8", "self_test": False}
    with fake_cuda():
        runner = warm_runner(architecture, tmp_path, monkeypatch, **settings)
        assert runner.row_edges == ROWS
        assert "fp8-kv" in runner.numerics_id
        assert runner.replays.cache.dtype == torch.float8_e4m3fn  # type: ignore[union-attr]
        log = {path: rows[0].cpu() for path, rows in play.play_decodes(runner, tokens, 3).items()}
    on_cpu = ModelRunner.load(EngineSettings(model=str(tmp_path), device="cpu", num_blocks=24, **settings))
    for path, rows in play.play_decodes(on_cpu, tokens, 3).items():
        torch.testing.assert_close(log[path], rows[0], rtol=0, atol=0.02 * float(rows[0].std()))


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        (
            "gemma2",
            {"dtype": "float16", "self_test": False},
            "GPU's own decoder: Gemma2ForCausalLM has not",
        ),
        ("llama", {"dtype": "float32"}, "fp8 needs bfloat16 or float16 on a GPU, not float32 on cuda"),
    ],
)
def test_weights_of_8_bits_are_refused_with_what_they_need(
    architecture: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = {"device": "cuda:0", "weight_quantization": "fp8", "block_size": 4, "num_blocks": 24, **more}
    model = save_tiny_model(architecture, tmp_path)
    with fake_cuda(), pytest.raises(ModelLoadError, match=message):
        ModelRunner.load(EngineSettings(model=str(model), **settings))


def no_compiler(*_: Any, **__: Any) -> None:
    raise CalledProcessError(1, ["gcc", "main.c"])


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_without_a_compiler_torch_computes_samples_and_replays_nothing(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(architecture, tmp_path)
    with fake_cuda():
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", no_compiler)
        monkeypatch.setattr(runner_module, "_WARMUP_ROWS", (2,))
        settings = DraftSettings(model=str(model), device="cuda:0", dtype="float32", block_size=4, num_blocks=24)
        built = build_engine(settings)
        assert "/torch/" in built.info.identity.numerics_id
        assert [record.levelname for record in caplog.records if "gcc python3-dev" in record.message] == ["WARNING"]
        assert built.drawing is None
        params = SamplingParams(max_tokens=9, seed=3, temperature=0.8, top_p=0.9)
        seq = built.engine.add([5, 6, 7], num_prompt_tokens=3)
        output = built.engine.step()
        assert output is not None
        found = built.sampler.sample(output.logits, [RowContext(params, 3, 3)])
        assert built.engine.stats().num_graphs == 0
        assert seq.num_computed_tokens == 3
        logits = output.logits.cpu()
    assert found == Sampler(built.sampler.vocab_size, "cpu").sample(logits, [RowContext(params, 3, 3)])


def test_deterministic_engines_name_the_compiler_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(model=str(save_tiny_model("llama", tmp_path)), device="cuda:0", deterministic=True)
    with fake_cuda():
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", no_compiler)
        with pytest.raises(ModelLoadError, match=r"deterministic: no GPU kernels: .*gcc.* needs a C compiler"):
            ModelRunner.load(settings)


@pytest.mark.parametrize(
    "error",
    [OutOfResources(300_000, 232_448, "shared memory"), RuntimeError("PassManager::run failed")],
    ids=["too large", "not compiled"],
)
def test_a_kernel_that_does_not_fit_a_gpu_is_replaced(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(attention, "attend", too_large)
    model = save_tiny_model("gemma2", tmp_path)
    with fake_cuda():
        settings = EngineSettings(model=str(model), device="cuda:0", dtype="float32", block_size=4, num_blocks=24)
        runner = ModelRunner.load(settings)
        assert "/torch/" in runner.numerics_id
        assert runner.replays is None


def test_a_step_that_compiles_does_not_make_steps_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, seen = [0.0], set[int]()
    with fake_cuda():
        runner = warm_runner("llama", tmp_path, monkeypatch, self_test=False)
        monkeypatch.setattr(runner_module, "_WARMUP_ROWS", (1, 32))
        forward = runner._step_model

        def compiling(batch: Batch, cache: Any) -> torch.Tensor:
            now_s[0] += 0.01 if len(batch.input_ids) in seen else 9.0
            seen.add(len(batch.input_ids))
            return forward(batch, cache)

        runner._step_model = compiling
        monkeypatch.setattr(runner_module.time, "monotonic", lambda: now_s[0])
        row_s = runner.warmup(captures=False)
        assert most_rows(runner.settings, row_s, "cuda") == 2048
