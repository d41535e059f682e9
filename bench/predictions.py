"""What speculation is predicted to gain on GPUs, and when another server is predicted to serve better.

    python -m bench.predictions                                    # print the page
    python -m bench.predictions --markdown docs/gpu-predictions.md
    python -m bench.predictions --beside bench/results/gpu-slot.json    # beside what a slot has measured

Nothing of it is measured but the host's time between two steps (``bench.host``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.inflate import Shape
from bench.pairs import DRAFTS, TARGETS
from bench.pairs import PAIRS as INFLATED
from bench.roofline import (
    CONTEXT,
    GPUS,
    MODELS,
    Gpu,
    ModelSizes,
    fits,
    num_weights,
    step_of,
    step_s,
)
from specdec.plan.inputs.step_times import (
    ALL_REDUCE_S,
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    GAP_OF_STREAM_S,
    KERNEL_START_S,
    PLAIN_GAP_S,
    RAMP_S,
)
from specdec.plan.inputs.step_times import GAP_S as SPECULATING_GAP_S

ROUND_TRIP_S = 0.3e-3
"""Seconds from a verdict to the first proposal besides drafting, for a draft on another GPU. Assumed."""
MOST_DRAFTED = 8
ACCEPTANCES = (0.6, 0.7, 0.8)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and what drafts for it."""

    name: str
    draft: str | ModelSizes
    target: str
    num_ranks: int = 1
    is_head: bool = False
    """Whether the draft is a head, which runs in the target's process only."""


_8B = MODELS["8B"]
EAGLE_8B = replace(_8B, layers=1, vocab=32000)
"""An EAGLE-3 head of an 8B model: a layer, and an output layer over the usual tokens."""
PAIRS = (
    Pair("1B, 8B", "1B", "8B"),
    Pair("EAGLE-3 head, 8B", EAGLE_8B, "8B", is_head=True),
    Pair("0.5B, 32B", "0.5B", "32B"),
    Pair("1B, 70B on 4 ranks", "1B", "70B", 4),
)


def speed_up(
    draft: str | ModelSizes,
    target: str | ModelSizes,
    num_ranks: int,
    gpu: Gpu,
    acceptance: float,
    *,
    is_apart: bool = False,
) -> tuple[float, int]:
    """Speed-up of speculation with chains of the best length over plain decoding, and that length; 0: plain is best.

    Together the draft runs before each step. Apart it drafts on while the target verifies, so that a chain that is
    accepted to its end is continued at once, and any other costs a round trip and a new chain. ``acceptance``: share of
    the tokens after accepted ones that are accepted.
    """
    plain_s = step_s(target, 1, gpu, num_ranks) + PLAIN_GAP_S
    best = (1.0, 0)
    for length in range(1, MOST_DRAFTED + 1):
        drafting_s = length * step_s(draft, 1, gpu)
        if is_apart:
            drafting_s = (1 - acceptance**length) * (drafting_s + ROUND_TRIP_S)
        round_s = drafting_s + step_s(target, length + 1, gpu, num_ranks) + SPECULATING_GAP_S
        num_tokens = sum(acceptance**i for i in range(length + 1))
        best = max(best, (num_tokens * plain_s / round_s, length))
    return best


# What is taken for vLLM 0.2x on an H100, from its own reports: flash attention 3, the next step scheduled while
# one runs, graphs up to 512 rows.
_OTHER_ATTENTION_SHARE = 0.85
_PREFILL_FLOPS, _OTHER_PREFILL_FLOPS = 115e12, 500e12
"""Operations per second of attention over a prompt."""
_MOST_CAPTURED = 256
_EAGER_START_S = 5e-6
STREAMS = (1, 8, 32, 64, 128, 256)
PROMPTS = (1024, 4096, 32768)


def decoding_s(num_streams: int, gpu: Gpu, *, is_other: bool = False) -> float:
    """Seconds of a plain step of an 8B model with streams of `CONTEXT` tokens; `is_other`: as vLLM would take."""
    step = step_of("8B", num_streams, num_seqs=num_streams)
    if is_other:
        of_memory = step.num_bytes / BANDWIDTH_SHARE + step.num_kv_bytes / _OTHER_ATTENTION_SHARE
        busy_s = max(of_memory / gpu.bandwidth, step.num_flops / (gpu.flops * COMPUTE_SHARE))
        return busy_s + step.num_kernels * KERNEL_START_S + step.num_products * RAMP_S
    gap_s = PLAIN_GAP_S + (num_streams - 1) * GAP_OF_STREAM_S
    eager_s = step.num_kernels * (_EAGER_START_S - KERNEL_START_S) if num_streams > _MOST_CAPTURED else 0.0
    return step_s("8B", num_streams, gpu, num_seqs=num_streams) + gap_s + eager_s


def prefill_s(num_tokens: int, gpu: Gpu, *, is_other: bool = False) -> float:
    """Seconds of computing a prompt with an 8B model."""
    products = 2 * num_weights(_8B) * num_tokens / (gpu.flops * COMPUTE_SHARE)
    attention = 2 * num_tokens**2 * _8B.heads * _8B.head_dim * _8B.layers
    return products + attention / (_OTHER_PREFILL_FLOPS if is_other else _PREFILL_FLOPS)


def markdown() -> str:
    """The page."""
    lines = [
        "# What GPUs are predicted to do",
        "",
        "**Predictions: nothing of this has been measured on a GPU.** `python -m bench.predictions` prints this page.",
        f"Assumed: {BANDWIDTH_SHARE:.0%} of a GPU's bandwidth ({ATTENTION_SHARE:.0%} for keys and values), "
        f"{COMPUTE_SHARE:.0%} of its dense bfloat16 arithmetic, {KERNEL_START_S * 1e6:.1f} us for each kernel of a "
        f"graph, {RAMP_S * 1e6:.0f} us for the ramps of each matrix product, {ALL_REDUCE_S * 1e6:.0f} us for a sum "
        f"over ranks. Between two steps the GPU waits {PLAIN_GAP_S * 1e3:.2f} ms, with speculation "
        f"{SPECULATING_GAP_S * 1e3:.2f} ms (`bench.host`, one session, 2-core EPYC). bfloat16, context {CONTEXT}.",
        "",
        "## Milliseconds of a step: 1, 8 and 64 rows of one sequence",
        "",
        "| model | kernels | " + " | ".join(GPUS) + " |",
        "|---|---|" + "---|" * len(GPUS),
    ]
    for name, num_ranks in (("0.5B", 1), ("1B", 1), ("8B", 1), ("32B", 1), ("70B", 4)):
        cells = []
        for gpu in GPUS.values():
            times = ", ".join(f"{step_s(name, n, gpu, num_ranks) * 1000:.2f}" for n in (1, 8, 64))
            cells.append(times if fits((name,), gpu, num_ranks) else "does not fit")
        label = name if num_ranks == 1 else f"{name}, {num_ranks} ranks"
        lines.append(f"| {label} | {step_of(name, 1).num_kernels} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Speed-up of speculation, one stream",
        "",
        "Over plain decoding, at the best number of drafted tokens (in parentheses): in turns on one GPU / with the "
        f"draft on another one, whose answer takes {ROUND_TRIP_S * 1e3:.1f} ms besides drafting. Chains are counted; "
        "trees accept more.",
        "",
        "| draft and target | accepted | " + " | ".join(GPUS) + " |",
        "|---|---|" + "---|" * len(GPUS),
    ]
    for pair in PAIRS:
        for acceptance in ACCEPTANCES:
            cells = [_speed_ups(pair, gpu, acceptance) for gpu in GPUS.values()]
            lines.append(f"| {pair.name} | {acceptance:.0%} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_beside_vllm(GPUS["H100 SXM"])]) + "\n"


def _speed_ups(pair: Pair, gpu: Gpu, acceptance: float) -> str:
    if not fits((pair.target,), gpu, pair.num_ranks):
        return "does not fit"
    cells = []
    for is_apart in (False,) if pair.is_head else (False, True):
        if is_apart or fits((pair.draft, pair.target), gpu, pair.num_ranks):
            arguments = pair.draft, pair.target, pair.num_ranks, gpu, acceptance
            cells.append("{:.2f} ({})".format(*speed_up(*arguments, is_apart=is_apart)))
        else:
            cells.append("does not fit")
    return " / ".join(cells)


def _beside_vllm(gpu: Gpu) -> list[str]:
    lines = [
        "",
        "## When an H100 user should take vLLM",
        "",
        "An 8B model in bfloat16 on one H100, plain, as predicted for both: vLLM with flash attention 3 "
        f"({_OTHER_ATTENTION_SHARE:.0%} of the bandwidth, {_OTHER_PREFILL_FLOPS / 1e12:.0f} TFLOP/s over prompts where "
        f"this has {_PREFILL_FLOPS / 1e12:.0f}), no host time between steps, graphs above {_MOST_CAPTURED} rows.",
        "",
        "| | here | vLLM |",
        "|---|---|---|",
    ]
    for number in STREAMS:
        ours, other = (number / decoding_s(number, gpu, is_other=is_other) for is_other in (False, True))
        lines.append(f"| tokens/s of {number} streams | {ours:,.0f} | {other:,.0f} |")
    for number in PROMPTS:
        ours, other = (prefill_s(number, gpu, is_other=is_other) * 1e3 for is_other in (False, True))
        lines.append(f"| ms for a prompt of {number:,} | {ours:,.0f} | {other:,.0f} |")
    many = next((n for n in STREAMS if decoding_s(n, gpu) > 1.2 * decoding_s(n, gpu, is_other=True)), None)
    long = next((n for n in PROMPTS if prefill_s(n, gpu) > 1.2 * prefill_s(n, gpu, is_other=True)), None)
    lines += [
        "",
        f"Take vLLM for {many} streams at once and more, for prompts of {long:,} tokens and more, for FP8 checkpoints, "
        "LoRA and images, and wherever only what was measured counts. Take this for few streams of a large target "
        "with a small draft, for a draft on another GPU, for equal tokens by seed, and for streams that outlive a "
        "replica.",
    ]
    return lines


_GPU_NAMES = {"H200": "H200", "H100 80GB HBM3": "H100 SXM", "A100-SXM4-80GB": "A100 80 GB", "NVIDIA L4": "L4",
              "RTX 4090": "RTX 4090", "RTX 3090": "RTX 3090"}  # fmt: skip
"""Names of `GPUS` by a part of the driver's name."""
_CONFIRMED_WITHIN = 0.15
"""Share of a measured figure by which a confirmed prediction may differ."""
_INFLATED_HEAD_DIM = 64


def gpu_named(name: str) -> Gpu | None:
    """A GPU by its driver's name; None where it is not known. "NVIDIA L40S" is no L4."""
    known = [gpu for part, gpu in _GPU_NAMES.items() if part in name and not name.partition(part)[2][:1].isalnum()]
    return GPUS[known[0]] if known else None


def sizes_of_shape(shape: Shape) -> ModelSizes:
    """An inflated model by its sizes."""
    heads = shape.num_heads, shape.num_kv_heads, _INFLATED_HEAD_DIM
    return ModelSizes(shape.hidden_size, shape.intermediate_size, shape.num_layers, *heads, shape.vocab_size)


def beside(state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each prediction whose figure a slot has measured: step times at context 1024, and speed-ups of single
    streams from the share of first draft tokens that were accepted."""
    lines = []
    for step in ("steps", "speedup", "large"):
        entry = state.get(step) or {}
        found = entry.get("found") or (entry.get("earlier") or {}).get("found") or {}
        gpu = gpu_named(entry.get("gpu") or (entry.get("earlier") or {}).get("gpu") or "")
        if gpu is None:
            continue
        for name in ("1b", "8b") if step == "steps" else ():
            for rows in (1, 8, 64):
                figure = f"{name}: {rows} rows at {CONTEXT}, ms"
                if figure in found:
                    lines.append(_compared(figure, found[figure], step_s(name.upper(), rows, gpu) * 1e3))
        pair = {"speedup": "gpu-8b", "large": "gpu-32b"}.get(step)
        for row in ((found.get("report") or {}).get("decode") or ()) if pair else ():
            if pair and row["batch"] == 1 and row["acceptance_by_depth"]:
                accepted, (target, draft) = row["acceptance_by_depth"][0], INFLATED[pair]
                models = sizes_of_shape(DRAFTS[draft]), sizes_of_shape(TARGETS[target])
                what = f"{step}: speed-up at temperature {row['temperature']:g}, {accepted:.0%} accepted"
                lines.append(_compared(what, row["speedup"]["median"], speed_up(*models, 1, gpu, accepted)[0]))
    return lines


def _compared(what: str, measured: float, predicted: float) -> str:
    is_close = abs(predicted - measured) <= _CONFIRMED_WITHIN * measured
    return f"{what}: {measured:.4g} (predicted: {predicted:.4g}): {'confirmed' if is_close else 'REFUTED'}"


def main() -> int:
    """Print the page or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="file for the page; without it the page is printed")
    parser.add_argument("--beside", type=Path, help="results of bench.gpu_slot")
    options = parser.parse_args()
    if options.beside:
        print("\n".join(beside(json.loads(options.beside.read_text()))))
        return 0
    page = markdown()
    if options.markdown:
        options.markdown.write_text(page)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
