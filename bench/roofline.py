"""Predicts step times on GPUs from bytes, floating-point operations, launches and programs; measures nothing.

Kernels and the bytes of weights and activations are counted in the decoder itself, on the meta device. The time of a
step is the longer one of memory and arithmetic, at a share of the vendor's figures, the starts of its kernels in a
captured graph, and the ramps of its matrix products. `bench.predictions` makes speed-ups and a page of it, and prints
it beside what a slot on a GPU (``bench.gpu_slot``) has measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from transformers import LlamaConfig

from bench.cubins import meta_batch
from bench.launches import LaunchCounter
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.cuda.attention import launch_shape
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.loader import random_model
from specdec.plan.inputs.devices import DEVICES, Device
from specdec.plan.inputs.step_times import (
    ALL_REDUCE_S,
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    KERNEL_START_S,
    RAMP_S,
)

CONTEXT = 1024
BLOCK_SIZE = 16
_PRODUCTS = frozenset({"mm", "addmm", "linear", "bmm"})


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its vendor's figures."""

    device: Device

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.device.bandwidth

    @property
    def flops(self) -> float:
        """Dense bfloat16 products, per second."""
        return self.device.flops

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.device.memory


GPUS = {
    "A100 80 GB": Gpu(DEVICES["A100"]),
    "H100 SXM": Gpu(DEVICES["H100"]),
    "H200": Gpu(DEVICES["H200"]),
    "L4": Gpu(DEVICES["L4"]),
    "RTX 4090": Gpu(DEVICES["RTX-4090"]),
    "RTX 3090": Gpu(DEVICES["RTX-3090"]),
}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A Llama-like model by its sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "0.5B": ModelSizes(896, 4864, 24, 14, 2, 64, 151936),
    "1B": ModelSizes(2048, 8192, 16, 32, 8, 64, 128256),
    "8B": ModelSizes(4096, 14336, 32, 32, 8, 128, 128256),
    "32B": ModelSizes(5120, 27648, 64, 40, 8, 128, 152064),
    "70B": ModelSizes(8192, 28672, 80, 64, 8, 128, 128256),
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step of some rows, of one sequence or of one each."""

    num_kernels: int
    num_products: int
    num_bytes: int
    """Bytes of weights and activations."""
    num_kv_bytes: int
    num_flops: int


def sizes_of(of: str | ModelSizes) -> ModelSizes:
    """A model's sizes, by its name or as they are."""
    return MODELS[of] if isinstance(of, str) else of


@cache
def step_of(of: str | ModelSizes, num_rows: int, context: int = CONTEXT, num_seqs: int = 1) -> StepCost:
    """Count the cost of a step of a model, by a pass on the meta device; `num_seqs`: 1, or one for each row."""
    model = sizes_of(of)
    geometries = [LayerGeometry(model.kv_heads, model.head_dim, model.head_dim)] * model.layers
    batch = meta_batch(num_rows, context)
    kv_cache = KVCache(geometries, 2, BLOCK_SIZE, torch.bfloat16, torch.device("meta"))
    decoder = _decoder(model)
    with torch.inference_mode(), LaunchCounter() as counter:
        decoder(batch, kv_cache)
    names = [name for name, _ in counter.operations]
    rows_per_tile = launch_shape(
        model.heads, geometries[0], torch.bfloat16, num_rows, row_invariant=False
    ).rows_per_tile
    tiles = num_seqs * -(-num_rows // num_seqs // rows_per_tile)
    return StepCost(
        num_kernels=len(names),
        num_products=sum(name in _PRODUCTS for name in names),
        num_bytes=sum(num_bytes for _, num_bytes in counter.operations),
        num_kv_bytes=2 * 2 * model.kv_heads * model.head_dim * model.layers * context * tiles,
        num_flops=2 * num_weights(model) * num_rows
        + 4 * num_rows * context * model.heads * model.head_dim * model.layers,
    )


@cache
def _decoder(model: ModelSizes) -> DeviceDecoder:
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        max_position_embeddings=8192,
    )
    options = [AttentionOptions(model.head_dim**-0.5)] * model.layers
    return DeviceDecoder(random_model(config, torch.bfloat16, torch.device("meta")), options, 8192)


def num_weights(model: ModelSizes) -> int:
    """Weights of a step's matrix products, the output layer included."""
    attention = model.hidden * (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    return model.layers * (attention + 3 * model.hidden * model.intermediate) + model.hidden * model.vocab


def step_s(of: str | ModelSizes, num_rows: int, gpu: Gpu, num_ranks: int = 1, num_seqs: int = 1) -> float:
    """Seconds that a step keeps the GPUs busy."""
    step = step_of(of, num_rows, num_seqs=num_seqs)
    bandwidth = num_ranks * gpu.bandwidth
    of_memory = step.num_bytes / (bandwidth * BANDWIDTH_SHARE) + step.num_kv_bytes / (bandwidth * ATTENTION_SHARE)
    of_arithmetic = step.num_flops / num_ranks / (gpu.flops * COMPUTE_SHARE)
    starts = step.num_kernels * KERNEL_START_S + step.num_products * RAMP_S
    collectives = 2 * sizes_of(of).layers * ALL_REDUCE_S if num_ranks > 1 else 0.0
    return max(of_memory, of_arithmetic) + starts + collectives


def fits(names: tuple[str | ModelSizes, ...], gpu: Gpu, num_ranks: int = 1) -> bool:
    """Whether the weights of models take at most 90 % of each GPU's memory."""
    return sum(2 * num_weights(sizes_of(name)) for name in names) / num_ranks <= 0.9 * gpu.memory
