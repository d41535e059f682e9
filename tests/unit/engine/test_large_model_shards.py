"""The shards of a model too large for here: shapes only, without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import initialize_distributed_mesh

from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.paged import RecordingKernel
from specdec.engine.batch import Batch
from specdec.engine.model.proofs.probe import SelfTest
from specdec.engine.model.ragged import RaggedModel
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.parallel.sharding import TensorParallelRefused, check_plan, shard_model

META = torch.device("meta")
LLAMA_70B = LlamaConfig(
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)


class ShapeGroup(RankGroup):
    """One rank whose collectives give the right shapes, and no values."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, META

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        return local.new_empty(self.size, *local.shape)


@contextmanager
def group_of(size: int) -> Iterator[ShapeGroup]:
    """The last rank of a group that this process pretends to be in."""
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    try:
        yield ShapeGroup(size - 1, size)
    finally:
        dist.destroy_process_group()


def batch_of_shapes(num_rows: int) -> Batch:
    probe = SelfTest(LLAMA_70B.vocab_size, 4096, 16, torch.device("cpu"))
    batch = probe.batch(probe.prefix_rows(num_rows))
    values = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return Batch(**{n: v.to(META) if isinstance(v, torch.Tensor) else v for n, v in values.items()})


@pytest.mark.parametrize("size", [4, 8])
def test_a_rank_of_a_70b_llama_has_its_part_of_every_matrix_and_of_the_kv_cache(size: int) -> None:
    check_plan(LLAMA_70B, size, trust_remote_code=False)
    with META:
        model = AutoModelForCausalLM.from_config(LLAMA_70B, dtype=torch.bfloat16, attn_implementation="eager")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    with group_of(size) as group, torch.inference_mode():
        config = DistributedConfig(tp_size=size)
        _, meshes = initialize_distributed_mesh(config)
        model = model.maybe_distribute_model(model, config, meshes)
        shard_model(model, group)
        recorder = RecordingKernel()
        batch = batch_of_shapes(7)
        logits = RaggedModel(model, recorder)(batch, None)  # type: ignore[arg-type]  # it records, and has no cache
    own = sum(parameter.numel() for parameter in model.parameters())
    assert own == (num_parameters - num_norms) // size + num_norms
    assert recorder.geometries == [LayerGeometry(8 // size, 128, 128)] * 80
    assert logits.shape == (len(batch.logits_indices), 128256)


def test_sixteen_ranks_are_too_many_for_eight_kv_heads() -> None:
    reason = "^tensor_parallel_size: 16 does not divide the 8 KV heads of LlamaForCausalLM$"
    with pytest.raises(TensorParallelRefused, match=reason):
        check_plan(LLAMA_70B, 16, trust_remote_code=False)
