"""Which models may be split over how many ranks, and what ranks tell each other."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from specdec.engine.batch import Batch, build_batch
from specdec.engine.errors import ModelNotSupported
from specdec.engine.leading_runner import LeadingRunner
from specdec.engine.model.loader import _tell_non_finite, check_tensor_parallel
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.frames import LeaderGone, StepFrame, StepKind, receive_frame
from specdec.engine.parallel.sharding import TensorParallelRefused, check_plan
from specdec.engine.parallel.step_frames import batch_of, copies_frame, copies_of, forward_frame
from specdec.engine.settings import EngineSettings
from specdec.engine.tap import FINAL, HiddenTap
from specdec.engine.tree import TokenTree
from specdec.replica.ranks.processes import share_cores
from tests.support.engine.exact_runner import make_engine
from tests.support.engine.recurrent_models import save_recurrent_model
from tests.support.engine.tiny_models import SUPPORTED, save_tiny_model

LARGE = LlamaConfig(
    num_hidden_layers=2, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8
)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        *((SUPPORTED[name](), 2) for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt_neox")),
        (SUPPORTED["llama_wide_heads"](), 4),
        (SUPPORTED["phi3"](), 4),
        (LARGE, 8),
    ],
)
def test_a_degree_that_divides_the_model_is_accepted(config: PreTrainedConfig, size: int) -> None:
    check_plan(config, size, trust_remote_code=False)


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (SUPPORTED["llama"](), 3, "does not divide the 4 attention heads of LlamaForCausalLM"),
        (SUPPORTED["llama"](), 4, "does not divide the 2 KV heads of LlamaForCausalLM"),
        (LARGE, 16, "does not divide the 8 KV heads"),
        (SUPPORTED["phi3"](), 3, "does not divide the 64 inputs of model.layers.0.self_attn.o_proj"),
        (
            LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=90, num_hidden_layers=1),
            4,
            "does not divide the 90 outputs of model.layers.0.mlp.gate_proj",
        ),
        (SUPPORTED["gpt2"](), 2, "transformers has no plan for the layers of GPT2LMHeadModel"),
        (SUPPORTED["opt"](), 2, "no plan for the layers of OPTForCausalLM"),
        (GptOssConfig(num_hidden_layers=1), 2, "no plan for the layers of GptOssForCausalLM"),
        (
            Qwen3MoeConfig(num_hidden_layers=1, num_experts=4, moe_intermediate_size=33),
            2,
            "rows of model.layers.0.mlp.experts.gate_up_proj",
        ),
    ],
)
def test_a_degree_that_the_model_cannot_have_is_refused_by_the_settings_name(
    config: PreTrainedConfig, size: int, reason: str
) -> None:
    with pytest.raises(TensorParallelRefused, match=f"^tensor_parallel_size: {size} .*{reason}"):
        check_plan(config, size, trust_remote_code=False)


def settings_of(model: Path, **settings: object) -> EngineSettings:
    return EngineSettings.model_validate({"model": str(model), "device": "cpu", "tensor_parallel_size": 2, **settings})


def test_what_the_machine_does_not_have_is_refused_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model("llama", tmp_path)
    (model / "model.safetensors").unlink()
    assert check_tensor_parallel(settings_of(model)) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(TensorParallelRefused, match=r"^tensor_parallel_size: 2 .*torch sees 1"):
        check_tensor_parallel(settings_of(model, device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert check_tensor_parallel(settings_of(model, device="cuda")) == "cuda:0"
    assert check_tensor_parallel(settings_of(model, device="cuda:1")) == "cuda:1"
    with pytest.raises(TensorParallelRefused, match=r"^tensor_parallel_size: 2 .*from cuda:2 on, and torch sees 3"):
        check_tensor_parallel(settings_of(model, device="cuda:2"))
    with pytest.raises(TensorParallelRefused, match=r"^tensor_parallel_size: 2 .*CUDA_VISIBLE_DEVICES"):
        check_tensor_parallel(settings_of(model))


def test_a_rank_looks_for_weights_that_are_no_numbers_in_its_own_part_without_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = nn.Linear(4, 6, bias=False)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        part = torch.full((3, 4), torch.nan)
        whole = DTensor.from_local(part, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        model.weight = nn.Parameter(whole, requires_grad=False)
        with CommDebugMode() as collectives:
            _tell_non_finite(model)
    finally:
        dist.destroy_process_group()
    assert "1 weights hold NaN or infinity: weight" in caplog.text
    assert collectives.get_total_counts() == 0


def test_a_model_that_cannot_be_paged_is_refused_for_that(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="recurrent layers need a CPU and one rank"):
        check_tensor_parallel(settings_of(save_recurrent_model("mamba", tmp_path)))


@pytest.mark.parametrize("size", [0, -1, 65])
def test_a_degree_out_of_range_is_an_error_of_the_settings(size: int) -> None:
    with pytest.raises(ValidationError, match="tensor_parallel_size"):
        EngineSettings(model="m", tensor_parallel_size=size)


def a_batch(num_nodes: int) -> Batch:
    """Two sequences in a step, the first with a branching tree of at most this many nodes."""
    engine, _ = make_engine()
    first = engine.add(list(range(9)), num_prompt_tokens=9)
    engine.step()
    engine.append(first, [9])
    if num_nodes:
        parents = [-1, -1, 0, 1, 2][:num_nodes]
        first.tree = TokenTree(list(range(20, 20 + num_nodes)), parents)
    engine.add([7, 8, 9], num_prompt_tokens=3, prompt_logits=True)
    batch, _ = build_batch(engine.scheduler.schedule(), engine.block_pool.block_size, "cpu")
    return batch


@pytest.mark.parametrize("num_nodes", [0, 1, 5], ids=["no tree", "a chain", "branches"])
def test_a_batch_arrives_as_it_was_sent(num_nodes: int) -> None:
    sent = a_batch(num_nodes)
    here, there = socket.socketpair()
    with here, there:
        here.sendall(forward_frame(sent).encode())
        received = batch_of(receive_frame(there), torch.device("cpu"))
    assert received.num_seqs == sent.num_seqs == 2
    assert received.tap is None
    assert bool(sent.path_slots.numel()) == (num_nodes == 5)
    for name in Batch.__dataclass_fields__:
        ours, theirs = getattr(sent, name), getattr(received, name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name
            assert theirs.is_contiguous(), name


class Noting:
    """What runs a rank's passes on a device, and only notes their batches."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        return torch.zeros(0)


@pytest.mark.parametrize(("device", "told"), [("meta", (-1, 2)), ("cpu", None)])
def test_all_ranks_of_a_device_that_captures_steps_compute_what_is_tapped_and_one_hands_it_out(
    device: str, told: tuple[int, ...] | None
) -> None:
    """A captured step is another one with a tap, and ranks must capture alike; a CPU captures nothing."""
    runner, batch = Noting(device), a_batch(0)
    batch.tap = HiddenTap((-1, 2))
    here, there = socket.socketpair()
    with here, there:
        LeadingRunner(cast(ModelRunner, runner), [here]).forward(batch)
        received = batch_of(receive_frame(there), torch.device("cpu"))
    assert (None if received.tap is None else received.tap.layer_ids) == told
    assert torch.equal(received.input_ids, batch.input_ids)
    [own] = runner.batches
    assert own.tap is batch.tap
    assert own.input_ids.device == runner.device


def test_a_batch_arrives_with_a_tap_of_the_same_layers() -> None:
    sent = a_batch(5)
    sent.tap = HiddenTap((FINAL, 0, 2))
    received = batch_of(forward_frame(sent), torch.device("cpu"))
    assert received.tap == HiddenTap((FINAL, 0, 2))
    assert torch.equal(received.block_tables, sent.block_tables)


def test_frames_of_every_kind_follow_each_other_on_one_connection() -> None:
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(copies_frame(StepKind.COPY_SLOTS, [3, 2**40], [5, 6]).encode())
            here.sendall(forward_frame(a_batch(2)).encode())
            here.sendall(copies_frame(StepKind.COPY_BLOCKS, [], []).encode())
            here.sendall(StepFrame(StepKind.STOP, (), bytearray()).encode())
        frames = [receive_frame(there) for _ in range(4)]
        with pytest.raises(LeaderGone):
            receive_frame(there)
    kinds = [StepKind.COPY_SLOTS, StepKind.FORWARD, StepKind.COPY_BLOCKS, StepKind.STOP]
    assert [frame.kind for frame in frames] == kinds
    assert copies_of(frames[0]) == ([3, 2**40], [5, 6])
    assert copies_of(frames[2]) == ([], [])


def test_a_frame_of_no_known_kind_is_refused() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(bytes([99]) + bytes(71))
        with pytest.raises(ValueError, match="99 is not a valid StepKind"):
            receive_frame(there)


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        ([4, 5, 6, 7], 2, [(4, 5), (6, 7)]),
        ([0, 1, 2], 2, [(0,), (1, 2)]),
        ([3], 1, [(3,)]),
        ([0, 1], 3, None),
    ],
)
def test_ranks_share_the_cores_evenly(cores: list[int], count: int, shares: list[tuple[int, ...]] | None) -> None:
    assert share_cores(cores, count) == shares
