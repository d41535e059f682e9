"""Predicts step times and speed-ups on GPUs from bytes, floating-point operations and launches; measures nothing.

    python -m bench.roofline --markdown bench/results/roofline.md

Kernels and the bytes of weights and activations are counted in the decoder itself, on the meta device. The time of a
step is the longer one of memory and arithmetic, at a share of the vendor's figures, and the starts of its kernels in a
captured graph. A slot on a GPU (``bench.gpu_slot``) confirms or refutes the predictions.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig

from bench.cubins import meta_batch
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.cuda.attention import launch_shape
from specdec.engine.cuda.launch import LaunchCounter
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.loader import random_model

# Assumptions. The share of bandwidth is what copies reach on an H200 (4.3 of 4.8 TB/s); the others are to be measured.
BANDWIDTH_SHARE = 0.9
COMPUTE_SHARE = 0.6
KERNEL_START_S = 1.2e-6
"""Seconds from one kernel of a graph to the next."""
HOST_GAP_S = 150e-6
"""Seconds that the GPU idles between two steps; the aim, not a measurement."""
ALL_REDUCE_S = 12e-6
"""Seconds of a sum over ranks, of a few rows over NVLink; a layer has two."""
CONTEXT = 1024
MOST_DRAFTED = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its vendor's figures."""

    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense bfloat16 products, per second."""
    memory: float
    """Bytes."""


GPUS = {
    "A100 80 GB": Gpu(2.039e12, 312e12, 80e9),
    "H100 SXM": Gpu(3.35e12, 989e12, 80e9),
    "H200": Gpu(4.8e12, 989e12, 141e9),
    "L4": Gpu(0.30e12, 121e12, 24e9),
    "RTX 4090": Gpu(1.008e12, 165e12, 24e9),
    "RTX 3090": Gpu(0.936e12, 71e12, 24e9),
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
# Draft, target, ranks of the target.
PAIRS = (("1B", "8B", 1), ("1B", "70B", 4), ("0.5B", "32B", 1))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step of some rows of one sequence."""

    num_kernels: int
    num_bytes: int
    num_flops: int


def _sizes(of: str | ModelSizes) -> ModelSizes:
    return MODELS[of] if isinstance(of, str) else of


@cache
def step_of(of: str | ModelSizes, num_rows: int, context: int = CONTEXT) -> StepCost:
    """Count the cost of a step of a model, by a pass on the meta device."""
    model = _sizes(of)
    geometries = [LayerGeometry(model.kv_heads, model.head_dim, model.head_dim)] * model.layers
    batch = meta_batch(num_rows, context)
    kv_cache = KVCache(geometries, 2, 16, torch.bfloat16, torch.device("meta"))
    decoder = _decoder(model)
    with torch.inference_mode(), LaunchCounter() as counter:
        decoder(batch, kv_cache)
    moved = sum(num_bytes for _, num_bytes in counter.operations)
    shape = launch_shape(model.heads, geometries[0], torch.bfloat16)
    tiles = -(-num_rows // shape.rows_per_tile)
    kv_bytes = 2 * 2 * model.kv_heads * model.head_dim * model.layers * context * tiles
    attention_flops = 4 * num_rows * context * model.heads * model.head_dim * model.layers
    return StepCost(len(counter.operations), moved + kv_bytes, 2 * _num_weights(model) * num_rows + attention_flops)


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
    geometries = [LayerGeometry(model.kv_heads, model.head_dim, model.head_dim)] * model.layers
    options = [AttentionOptions(model.head_dim**-0.5)] * model.layers
    return DeviceDecoder(random_model(config, torch.bfloat16, torch.device("meta")), geometries, options, 8192)


def _num_weights(model: ModelSizes) -> int:
    """Weights of a step's matrix products, the output layer included."""
    attention = model.hidden * (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    return model.layers * (attention + 3 * model.hidden * model.intermediate) + model.hidden * model.vocab


def step_s(of: str | ModelSizes, num_rows: int, gpu: Gpu, num_ranks: int = 1) -> float:
    """Seconds that a step keeps the GPUs busy."""
    step = step_of(of, num_rows)
    of_memory = step.num_bytes / num_ranks / (gpu.bandwidth * BANDWIDTH_SHARE)
    of_arithmetic = step.num_flops / num_ranks / (gpu.flops * COMPUTE_SHARE)
    collectives = 2 * _sizes(of).layers * ALL_REDUCE_S if num_ranks > 1 else 0.0
    return max(of_memory, of_arithmetic) + step.num_kernels * KERNEL_START_S + collectives


def fits(names: tuple[str, ...], gpu: Gpu, num_ranks: int = 1) -> bool:
    """Whether the weights of models take at most 90 % of each GPU's memory."""
    return sum(2 * _num_weights(MODELS[name]) for name in names) / num_ranks <= 0.9 * gpu.memory


def speed_up(
    draft: str | ModelSizes, target: str | ModelSizes, num_ranks: int, gpu: Gpu, acceptance: float
) -> tuple[float, int]:
    """Speed-up of speculation with chains of the best length over plain decoding, and that length.

    The draft runs before each step, not beside it. ``acceptance``: share of the tokens after accepted ones that are
    accepted.
    """
    plain_s = step_s(target, 1, gpu, num_ranks) + HOST_GAP_S
    best = (1.0, 0)
    for length in range(1, MOST_DRAFTED + 1):
        drafting_s = length * step_s(draft, 1, gpu) + HOST_GAP_S
        round_s = drafting_s + step_s(target, length + 1, gpu, num_ranks) + HOST_GAP_S
        num_tokens = sum(acceptance**i for i in range(length + 1))
        best = max(best, (num_tokens * plain_s / round_s, length))
    return best


def markdown() -> str:
    """The page with both tables."""
    rows = (1, 8, 64)
    lines = [
        "# What GPUs are predicted to do",
        "",
        "**Predictions**, made by `python -m bench.roofline`; nothing of this has been measured. Assumed: "
        f"{BANDWIDTH_SHARE:.0%} of a GPU's bandwidth, {COMPUTE_SHARE:.0%} of its dense bfloat16 arithmetic, "
        f"{KERNEL_START_S * 1e6:.1f} us for each kernel of a graph, {HOST_GAP_S * 1e6:.0f} us of idling between steps, "
        f"{ALL_REDUCE_S * 1e6:.0f} us for a sum over ranks. bfloat16, one sequence, context {CONTEXT}.",
        "",
        "## Milliseconds of a step: 1, 8 and 64 rows",
        "",
        "| model | kernels | " + " | ".join(GPUS) + " |",
        "|---|---|" + "---|" * len(GPUS),
    ]
    for name, num_ranks in (("0.5B", 1), ("1B", 1), ("8B", 1), ("32B", 1), ("70B", 4)):
        cells = []
        for gpu in GPUS.values():
            times = ", ".join(f"{step_s(name, n, gpu, num_ranks) * 1000:.2f}" for n in rows)
            cells.append(times if fits((name,), gpu, num_ranks) else "does not fit")
        label = name if num_ranks == 1 else f"{name}, {num_ranks} ranks"
        lines.append(f"| {label} | {step_of(name, 1).num_kernels} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Speed-up of speculation, one stream, at the best number of drafted tokens",
        "",
        "| draft and target | accepted | " + " | ".join(GPUS) + " |",
        "|---|---|" + "---|" * len(GPUS),
    ]
    for draft, target, num_ranks in PAIRS:
        for acceptance in (0.6, 0.8, 0.9):
            cells = []
            for gpu in GPUS.values():
                ratio, length = speed_up(draft, target, num_ranks, gpu, acceptance)
                is_possible = fits((draft, target), gpu, num_ranks)
                cells.append(f"{ratio:.2f} ({length})" if is_possible else "does not fit")
            ranks = "" if num_ranks == 1 else f", {num_ranks} ranks"
            lines.append(f"| {draft}, {target}{ranks} | {acceptance:.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the page or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="file for the page; without it the page is printed")
    options = parser.parse_args()
    page = markdown()
    if options.markdown:
        options.markdown.write_text(page)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
