"""What loading on a GPU has to do, as far as a machine without one can show it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.distributed import utils as distributed_utils

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.batch import Batch
from specdec.engine.errors import ModelLoadError
from specdec.engine.model import loader
from specdec.engine.model.kv_budget import affordable_kv_bytes, largest_batch
from specdec.engine.model.loader import load_model, random_model
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.rank_group import RankGroup, device_of_rank
from specdec.engine.settings import EngineSettings
from tests.support.engine.tiny_models import SUPPORTED, VOCAB_SIZE, save_tiny_model

GEOMETRY = LayerGeometry(2, 16, 16)


def test_random_weights_are_made_on_the_device_that_runs_them() -> None:
    model = random_model(SUPPORTED["llama"](), torch.bfloat16, torch.device("meta"))
    places = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    assert places == {"meta"}
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_weights_are_not_cut_from_memory_that_transformers_takes_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def ahead(*_args: object, **_kwargs: object) -> None:
        calls.append("ahead")

    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", ahead)
    read = AutoModelForCausalLM.from_pretrained

    def placed(*args: Any, **kwargs: Any) -> Any:
        return read(*args, **kwargs, device_map={"": "cpu"})

    directory = str(save_tiny_model("llama", tmp_path))
    placed(directory)
    assert calls == ["ahead"]  # else transformers does it elsewhere
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", placed)
    load_model(EngineSettings(model=directory, device="cpu"))
    placed(directory)
    assert calls == ["ahead", "ahead"]


def test_random_weights_touch_the_generator_of_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_args: object) -> torch.Tensor:
        raise AssertionError("this starts a context on a GPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)
    before = torch.random.get_rng_state()
    random_model(SUPPORTED["llama"](), torch.float32, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_on_the_second_gpu_makes_it_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def set_device(device: torch.device) -> None:
        raise Reached(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    settings = EngineSettings(model=str(save_tiny_model("llama", tmp_path)), device="cuda:1")
    with pytest.raises(Reached, match=r"^cuda:1$"):
        load_model(settings)


@pytest.mark.parametrize(
    ("first", "rank", "expected"), [("cpu", 3, "cpu"), ("cuda:0", 0, "cuda:0"), ("cuda:2", 1, "cuda:3")]
)
def test_ranks_take_the_gpus_from_the_first_one_on(first: str, rank: int, expected: str) -> None:
    assert str(device_of_rank(first, rank)) == expected


def test_an_older_transformers_is_named_where_ranks_cannot_have_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_utils, "initialize_distributed_mesh")
    group = RankGroup.__new__(RankGroup)
    with pytest.raises(ModelLoadError, match=r"needs transformers 5\.23, not "):
        random_model(SUPPORTED["llama"](), torch.float32, torch.device("meta"), group=group)


class Memory:
    """A device of 1,000 MB on which a pass takes 100 MB."""

    def free_bytes(self) -> int:
        return 1_000_000_000

    def total_bytes(self) -> int:
        return 2_000_000_000

    def own_bytes(self) -> int:
        return 300_000_000

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 100_000_000


def test_the_cache_gets_what_the_largest_step_leaves() -> None:
    passes = []

    def forward(batch: Batch, cache: KVCache) -> torch.Tensor:
        passes.append((len(batch.input_ids), len(batch.logits_indices), cache.num_blocks))
        return torch.zeros(0)

    def budget(num_rows: int, num_logits: int, memory_fraction: float | None = None, reserved: int = 0) -> int:
        return affordable_kv_bytes(
            Memory(),
            forward,
            [GEOMETRY],
            num_rows=num_rows,
            max_model_len=100,
            num_logits=num_logits,
            block_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
            memory_fraction=memory_fraction,
            reserved_bytes=reserved,
        )

    assert budget(8, 1000, 1.0) == budget(8, 1000)  # no more than is free
    assert budget(8, 1000, 0.25) == int((500_000_000 - 300_000_000 - 100_000_000 - 8 * 1000 * 64) * 0.9)
    assert budget(8, 1000, 0.1) < 0
    assert budget(8, 1000, reserved=10_000_000) == int((890_000_000 - 8 * 1000 * 64) * 0.9)
    passes.clear()
    assert budget(8, 1000) == int((900_000_000 - 8 * 1000 * 64) * 0.9)
    # 512 rows are sampled in turns.
    assert budget(512, 128_000) == int((900_000_000 - 64 * 128_000 * 64) * 0.9)
    assert passes == [(8, 8, 1), (512, 512, 6 * 7)]


def test_the_largest_batch_is_one_that_a_model_runs(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    runner = ModelRunner.load(EngineSettings(model=str(model), device="cpu", block_size=8, num_blocks=64))
    batch, num_blocks = largest_batch(200, runner.max_model_len, 8, torch.device("cpu"))
    assert num_blocks <= 64
    logits = runner.forward(batch)
    assert logits.shape == (200, VOCAB_SIZE)
    assert logits.isfinite().all()
    assert torch.equal(batch.position_ids[-40:], torch.arange(40))


def test_random_weights_of_a_gpu_have_a_digest_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(model=str(save_tiny_model("llama", tmp_path)), device="cpu", load_format="dummy")
    digest = load_model(settings).identity.weights_digest
    monkeypatch.setattr(loader, "choose_device", lambda _name: torch.device("meta"))
    assert load_model(settings).identity.weights_digest == digest.replace("random-0-", "random-0-meta-")


@pytest.mark.parametrize(
    ("built_for", "message"), [(None, "is built without CUDA"), ("13.0", "needs a driver for CUDA 13; nvidia-smi")]
)
def test_a_gpu_that_torch_does_not_see_is_refused_with_what_torch_needs(
    built_for: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    settings = EngineSettings(model=str(save_tiny_model("llama", tmp_path)), device="cuda")
    with pytest.raises(ModelLoadError, match=message):
        load_model(settings)
