"""Small targets for heads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.drafting.heads.target import HeadTarget
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.scheduler import Scheduler
from specdec.engine.settings import EngineSettings

FIXTURES = Path(__file__).parents[2] / "fixtures" / "heads"
"""Folder of the fixtures that its `make.py` makes."""


def fixture_target(directory: Path) -> HeadTarget:
    """A target of the fixtures' sizes, with the embedding that some of their heads share."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=4,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
        model.model.embed_tokens.weight.copy_(
            load_file(FIXTURES / "target_embedding.safetensors")["embed_tokens.weight"]
        )
    model.save_pretrained(directory)
    return target_of(directory)


def target_of(directory: Path) -> HeadTarget:
    """A target for heads, with the model of a folder."""
    settings = EngineSettings(model=str(directory), device="cpu", block_size=8, num_blocks=64)
    runner = ModelRunner.load(settings)
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = Engine(runner, pool, Scheduler(pool, 64, 16, runner.max_model_len))
    return HeadTarget(runner, engine, Sampler(runner.vocab_size, "cpu"))
