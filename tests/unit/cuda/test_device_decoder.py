"""The GPU's decoder: the logits of transformers' own modules, few launches, and nothing that waits for data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.launches import LaunchCounter
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.checkpoints.rounding import quantize_linear_weights
from specdec.engine.cuda.attention import TritonAttention
from specdec.engine.model import loader
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.fused import is_fusable
from specdec.engine.model.kv_budget import largest_batch
from specdec.engine.model.loader import load_model, random_model
from specdec.engine.model.proofs.probe import SelfTest, tolerance
from specdec.engine.model.ragged import RaggedModel
from specdec.engine.settings import EngineSettings
from specdec.engine.tap import FINAL, HiddenTap
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.engine.triton_device import DEVICE

META = torch.device("meta")
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)


SKIPS: dict[str, dict[str, Any]] = {
    "whole": {},
    "first attention": {"skip_attention_layers": "0", "skip_mlp_layers": "1"},
    "no MLP": {"skip_attention_layers": "2", "skip_mlp_layers": "0-1"},
}


@pytest.mark.parametrize(
    ("architecture", "skips"),
    [("llama_yarn_bias", "whole"), ("qwen3", "whole"), ("llama_yarn_bias", "first attention"), ("qwen3", "no MLP")],
)
@torch.inference_mode()
def test_its_logits_are_those_of_the_models_own_modules(
    architecture: str, skips: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "LEAST_AGREEMENT", 0.0)  # of random weights
    model = save_tiny_model(architecture, tmp_path, num_layers=3)
    settings = EngineSettings(model=str(model), device=DEVICE, dtype="float32", block_size=8, **SKIPS[skips])
    loaded = load_model(settings)
    probe = SelfTest(loaded.vocab_size, loaded.max_model_len, 8, loaded.device)
    expected = {
        tuple(tokens): loaded.model(input_ids=torch.tensor([tokens], device=loaded.device), use_cache=False).logits[0]
        for tokens in probe.sequences
    }
    ids = torch.tensor([[row.path[-1] for row in probe.prefix_rows(5)]], device=loaded.device)
    states = loaded.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    hidden = torch.stack([states[-1][0], *(each[0] for each in states[:3])], dim=1)
    recorded = RaggedModel(loaded.model, TiledAttention()).record_attention(probe)
    assert is_fusable(loaded.model, recorded.geometries, recorded.options, 256)
    decoder = DeviceDecoder(loaded.model, recorded.options, loaded.max_model_len)
    cache = KVCache(recorded.geometries, probe.num_blocks, 8, torch.float32, loaded.device)
    log = probe.run(decoder, cache)
    assert log.error(lambda tokens: expected[tuple(tokens.tolist())], probe.sequences) < 1e-5
    batch = probe.batch(probe.prefix_rows(5))
    batch.tap = HiddenTap((FINAL, 0, 1, 2))
    decoder(batch, cache)
    assert batch.tap.states is not None
    assert (batch.tap.states - hidden).abs().max() < 1e-5 * hidden.abs().max()


@torch.inference_mode()
def test_weights_of_8_bits_give_nearly_the_logits_of_the_rounded_model(tmp_path: Path) -> None:
    model = save_tiny_model("qwen3", tmp_path, num_layers=2)
    loaded = load_model(EngineSettings(model=str(model), device=DEVICE, dtype="float32", block_size=8))
    quantize_linear_weights(loaded.model, "fp8")
    probe = SelfTest(loaded.vocab_size, loaded.max_model_len, 8, loaded.device)
    expected = {
        tuple(tokens): loaded.model(input_ids=torch.tensor([tokens], device=loaded.device), use_cache=False).logits[0]
        for tokens in probe.sequences
    }
    recorded = RaggedModel(loaded.model, TiledAttention()).record_attention(probe)
    decoder = DeviceDecoder(loaded.model, recorded.options, loaded.max_model_len, is_fp8=True)
    log = probe.run(decoder, KVCache(recorded.geometries, probe.num_blocks, 8, torch.float32, loaded.device))
    error = log.error(lambda tokens: expected[tuple(tokens.tolist())], probe.sequences)
    assert 1e-3 < error < tolerance(torch.bfloat16, is_fp8=True)


@pytest.mark.parametrize("is_own", [True, False], ids=["decoder", "modules"])
@torch.inference_mode()
def test_a_token_that_is_not_finite_spoils_no_row_that_does_not_see_it(is_own: bool, tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path, num_layers=1)
    loaded = load_model(EngineSettings(model=str(model), device=DEVICE, dtype="float32", block_size=8))
    probe = SelfTest(loaded.vocab_size, loaded.max_model_len, 8, loaded.device)
    ragged = RaggedModel(loaded.model, TritonAttention())
    recorded = ragged.record_attention(probe)
    ragged.model.model.embed_tokens.weight[7] = torch.nan
    step_model = DeviceDecoder(loaded.model, recorded.options, loaded.max_model_len) if is_own else ragged
    cache = KVCache(recorded.geometries, probe.num_blocks, 8, torch.float32, loaded.device)
    batch = probe.batch(probe.prefix_rows(5))
    batch.input_ids.copy_(torch.tensor([1, 2, 3, 4, 5]))
    expected = step_model(batch, cache)
    batch.input_ids[4] = 7
    found = step_model(batch, cache)
    assert found[4].isnan().all()
    assert torch.equal(found[:4], expected[:4])


@pytest.fixture(scope="module")
def decoder_of_8b() -> DeviceDecoder:
    model = random_model(LLAMA_8B, torch.bfloat16, META)
    layers = LLAMA_8B.num_hidden_layers
    return DeviceDecoder(model, [AttentionOptions(128**-0.5)] * layers, 8192)


@pytest.mark.parametrize(("num_rows", "context_len"), [(1, 256), (8, 256), (8, 4096), (256, 8192), (512, 512)])
@torch.inference_mode()
def test_a_step_of_an_8b_model_launches_eleven_kernels_a_layer(
    num_rows: int, context_len: int, decoder_of_8b: DeviceDecoder
) -> None:
    batch, num_blocks = largest_batch(num_rows, 8192, 16, META)
    batch.block_tables = torch.empty(1, context_len // 16, dtype=torch.int32, device=META)
    layers = LLAMA_8B.num_hidden_layers
    cache = KVCache([LayerGeometry(8, 128, 128)] * layers, num_blocks, 16, torch.bfloat16, META)
    with LaunchCounter() as counter:
        logits = decoder_of_8b(batch, cache)
    assert logits.shape == (num_rows, LLAMA_8B.vocab_size)
    num_parts = [name for name, _ in counter.operations].count("plan_kernel")
    assert num_parts == (2 if num_rows * context_len > 1 << 20 else 1), (
        "results of attention beyond 128 MiB come in parts"
    )
    per_pass = len(counter.operations) - (11 + 2 * (num_parts - 1)) * layers
    assert 0 < per_pass <= 12, counter.operations[-20:]


@pytest.mark.parametrize("context_len", [256, 4096])
@torch.inference_mode()
def test_a_deterministic_step_has_no_kernel_more_and_none_of_the_librarys_products(context_len: int) -> None:
    layers, geometry = 2, LayerGeometry(8, 128, 128)
    config = LlamaConfig(**{**LLAMA_8B.to_dict(), "num_hidden_layers": layers})
    decoder = DeviceDecoder(
        random_model(config, torch.bfloat16, META), [AttentionOptions(128**-0.5)] * layers, 8192,
        row_invariant=True,
    )  # fmt: skip
    batch, num_blocks = largest_batch(8, 8192, 16, META)
    batch.block_tables = torch.empty(1, context_len // 16, dtype=torch.int32, device=META)
    cache = KVCache([geometry] * layers, num_blocks, 16, torch.bfloat16, META)
    with LaunchCounter() as counter:
        decoder(batch, cache)
    names = [name for name, _ in counter.operations]
    assert names.count("product_kernel") == 4 * layers + 1
    assert not {"mm", "addmm", "linear", "matmul", "bmm", "all_reduce_"} & set(names)
    assert 0 < len(names) - 11 * layers <= 10, names


@torch.inference_mode()
def test_a_step_of_one_row_moves_little_besides_the_weights(decoder_of_8b: DeviceDecoder) -> None:
    batch, num_blocks = largest_batch(1, 8192, 16, META)
    cache = KVCache([LayerGeometry(8, 128, 128)] * LLAMA_8B.num_hidden_layers, num_blocks, 16, torch.bfloat16, META)
    with LaunchCounter() as counter:
        decoder_of_8b(batch, cache)
    embedding = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size * 2
    weights = 8_030_261_248 * 2 - embedding  # of the embedding a row is read
    moved = sum(num_bytes for _, num_bytes in counter.operations)
    assert weights < moved < weights * 1.002
