"""Captured steps, sampling, attention, row invariance and drafting on a CUDA device, with models of real shapes.

`make gpu-slot` runs these as steps of a slot; a dry slot runs them small on the simulated GPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from triton.testing import do_bench

from bench.shaped import TINY, random_runner, rows_of
from specdec.engine.cuda.sampling import start_draws
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.rows import DrawRow, DrawRule
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import row_numbers
from specdec.engine.sampling.sampler import Sampler
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine import paged_scenarios as play
from tests.support.engine.drawn_rows import ADJUSTED
from tests.support.engine.sampling_rows import make_logits, make_row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda:0")
IS_PLAYED = torch.cuda.is_available() and torch.cuda.get_device_name() == "NVIDIA Fake"
DTYPES = ("float32",) if IS_PLAYED else ("float32", "float16", "bfloat16")
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 700, "head_dim": 256,
         "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128,
           "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = ({"head_dim": 128}, GEMMA, GPT_OSS)  # the last two: windows and soft caps; sinks
FEW = {"num_hidden_layers": 2, "vocab_size": 512}
Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.inference_mode():
        yield


def runner_of(shape: str, max_len: int, **settings: Any) -> ModelRunner:
    """A model of a shape of `bench.shaped` with captured steps, which uses the device's kernels."""
    dtype, spare = ("float32", 8) if IS_PLAYED else ("bfloat16", 160)
    defaults = {"device": "cuda:0", "max_model_len": max_len, "num_blocks": max_len // 16 + spare, "dtype": dtype}
    runner = random_runner(TINY if IS_PLAYED else shape, **{**defaults, **settings})
    assert runner.num_graphs
    assert "triton" in runner.numerics_id
    return runner


def test_a_replay_equals_an_eager_step_and_never_waits_for_the_device(record_property: Record) -> None:
    runner, context = runner_of("llama-1b", 96 if IS_PLAYED else 2048), 40 if IS_PLAYED else 1024
    replays = runner.replays
    assert replays is not None
    cache = replays.cache
    runner.forward(rows_of(runner, 0, context)[0])
    record_property("captured steps", runner.num_graphs)
    for num_rows in (1, 4) if IS_PLAYED else (1, 8, 64):  # whole buckets: products over padded rows may differ
        batch, _ = rows_of(runner, context - num_rows, num_rows)
        torch.cuda.set_sync_debug_mode("error")
        replayed = replays(batch, cache).clone()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(replayed, replays.forward(batch, cache)), num_rows


def test_tokens_are_sampled_as_on_the_cpu_with_all_controls(record_property: Record) -> None:
    num_rows, vocab_size = (7, 500) if IS_PLAYED else (90, 128256)
    controls = [{}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05, "repetition_penalty": 1.05}, *ADJUSTED]
    asked = [{"temperature": (1.0, 0.7, 0.0)[n % 3], **controls[n % len(controls)]} for n in range(num_rows)]
    rows = [make_row(**{"seed": n, "max_tokens": 999, **each}) for n, each in enumerate(asked)]
    logits = make_logits(num_rows, vocab_size)
    wanted, drawn = (Sampler(vocab_size, d).candidates(logits.to(d), rows, 4) for d in ("cpu", DEVICE))
    pairs = [(a, b) for of_row in zip(wanted, drawn, strict=True) for a, b in zip(*of_row, strict=True)]
    assert [a.token_id for a, _ in pairs] == [b.token_id for _, b in pairs]
    record_property("scores that differ", sum(a.score != b.score for a, b in pairs))
    eight, numbers = logits[:8].to(DEVICE), row_numbers([make_row(seed=1, max_tokens=9)] * 8, vocab_size)
    if not IS_PLAYED:
        record_property("sampling of 8 rows, ms", do_bench(partial(start_draws, eight, numbers, list(range(16)), 4)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_attention_is_proved_at_load(kind: dict[str, Any], dtype: str, record_property: Record) -> None:
    """After 2,100 tokens and in trees as well, against torch's attention."""
    runner = runner_of("llama-1b", 96 if IS_PLAYED else 4096, more={**FEW, **kind}, dtype=dtype, self_test=True)
    record_property(f"{dtype} {kind.get('model_type', 'heads of 128')}", runner.numerics_id)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_of_each_dtype_are_proved_at_load(dtype: str, deterministic: bool, record_property: Record) -> None:
    settings = {"dtype": dtype, "deterministic": deterministic, "self_test": True}
    runner = runner_of("llama-1b", 96 if IS_PLAYED else 4096, more=FEW, **settings)
    record_property(f"{dtype}{', deterministic' * deterministic}", runner.numerics_id)


@pytest.mark.parametrize(("shape", "length"), [("tiny", 40)] if IS_PLAYED else [("llama-1b", 1536), ("llama-8b", 4608)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_bits_of_rows_in_chunks_in_trees_and_in_company(
    shape: str, length: int, deterministic: bool, record_property: Record
) -> None:
    runner = runner_of(shape, length + 64, deterministic=deterministic, num_blocks=length // 4)
    tokens, wrong = (play.random_tokens(count, seed, runner.vocab_size) for seed, count in enumerate((length, 9)))
    whole, tail = play.play_alone(runner, tokens), 12 if IS_PLAYED else 96
    ways: dict[str, Callable[[], play.Log]] = {
        f"in chunks of {most}": partial(play.play_alone, runner, tokens, most)
        for most in ((7,) if IS_PLAYED else (384, 64, 7, 2))
    }
    ways["one by one"] = partial(play.play_decodes, runner, tokens, length - tail)
    ways["in trees"] = partial(play.play_trees, runner, tokens, length - tail, wrong)
    ways["in company"] = partial(play.play_in_batch, runner, tokens, [wrong, tokens[1:]])
    for way, computed in ways.items():
        pairs = [(row, whole[path][0]) for path, rows in computed().items() if path in whole for row in rows]
        differing = sum(not torch.equal(*pair) for pair in pairs)
        record_property(
            f"differing of {len(pairs)} rows of {shape} {way}{', deterministic' * deterministic}", differing
        )
        assert pairs
        assert not differing or not deterministic or IS_PLAYED, way  # interpreted products depend on the number of rows


def test_eight_tokens_are_drafted_in_one_graph(record_property: Record) -> None:
    context, num_tokens = (8, 3) if IS_PLAYED else (1024, 8)
    runner = runner_of("llama-1b", 96 if IS_PLAYED else 2048)
    assert runner.replays is not None
    sampler = Sampler(runner.vocab_size, DEVICE)
    drawing = DeviceDrawing(runner.replays, runner.max_model_len, sampler)
    rule = DrawRule(SamplingParams(seed=1, max_tokens=99, temperature=1.0))
    row = DrawRow(rule, 0, context + 1, num_tokens, array("i", range(runner.max_model_len // runner.block_size)))
    logits = runner.forward(rows_of(runner, context, 1)[0])  # the first token is drawn from them
    draw = partial(drawing.draw, [row], logits, 2)
    assert len(draw()[0]) == num_tokens
    if not IS_PLAYED:
        record_property("8 tokens, ms", do_bench(draw))
