"""Steps that run all services by a command, whose report is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from bench.gpu_slot.models import Found, StepSetup

if TYPE_CHECKING:
    from bench.inflate import Shape

_BESIDE_BYTES = 8 << 30
"""Bytes of GPU memory beside weights: KV caches, captured steps and libraries of both services."""
_MOST_KEPT = 6000
"""Characters kept of a command's output."""


def selftest(place: StepSetup) -> Found:
    """Numerics ids of the shipped target as an engine loads it, in each dtype, fast and deterministic.

    Raises AssertionError where the GPU's decoder failed its self-test and is not used; the log has the error.
    """
    from specdec.commands.up.plan import shipped_model
    from specdec.engine.model.runner import ModelRunner
    from specdec.engine.settings import EngineSettings

    found: Found = {}
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...] = ("float32", "float16", "bfloat16")
    for dtype in dtypes[:1] if place.dry else dtypes:
        for is_deterministic in (False, True):
            settings = EngineSettings(
                model=shipped_model("target"),
                device=str(place.device),
                dtype=dtype,
                deterministic=is_deterministic,
                num_blocks=64,
            )
            runner = ModelRunner.load(settings)
            found[f"{dtype}{', deterministic' if is_deterministic else ''}"] = runner.numerics_id
            place.keep(found)
            if not place.dry and "decoder" not in runner.numerics_id:
                raise AssertionError(found)
    return found


def greedy(place: StepSetup) -> Found:
    """Greedy tokens of the shipped target in float32 on the device, beside transformers' dense logits of the same text.

    Raises AssertionError where more than near-ties differ: in one of a hundred tokens.
    """
    from transformers import AutoModelForCausalLM

    from bench.prompts import held_out_prompts
    from specdec.commands.up.plan import shipped_model
    from specdec.engine.block_pool import BlockPool
    from specdec.engine.engine import Engine
    from specdec.engine.model.runner import ModelRunner
    from specdec.engine.sampling.sampler import RowContext, Sampler
    from specdec.engine.scheduler import Scheduler
    from specdec.engine.settings import EngineSettings
    from specdec.wire.sampling_params import SamplingParams

    folder, num_tokens, num_prompts = shipped_model("target"), 12 if place.dry else 256, 1 if place.dry else 4
    settings = EngineSettings(model=folder, device=str(place.device), dtype="float32", num_blocks=256)
    runner = ModelRunner.load(settings)
    runner.warmup()
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = Engine(runner, pool, Scheduler(pool, 512, 8, runner.max_model_len), None, runner)
    sampler = Sampler(runner.vocab_size, runner.device, native=runner.native_sampling)
    dense: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    dense.to(place.device).eval()
    params, found = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0), {"captured": runner.num_graphs}
    num_differing = num_compared = 0
    for prompt in held_out_prompts(Path(folder), num_prompts):
        ids = list(prompt)
        seq = engine.add(ids, num_prompt_tokens=len(ids))
        for _ in range(num_tokens):
            output = engine.step()
            assert output is not None
            [token] = sampler.sample(output.logits[-1:], [RowContext(params, len(seq.token_ids), len(ids))])
            assert token is not None, "the logits are not finite"
            engine.append(seq, [token])
        text = torch.tensor([seq.token_ids[:-1]], device=place.device)
        likeliest = dense(input_ids=text, use_cache=False).logits[0, len(ids) - 1 :].argmax(1).tolist()
        num_differing += sum(a != b for a, b in zip(likeliest, seq.token_ids[len(ids) :], strict=True))
        num_compared += num_tokens
        engine.free(seq)
        found |= {"tokens": num_compared, "tokens that differ": num_differing}
        place.keep(found)
    if num_differing > num_compared / 100:
        raise AssertionError(found)
    return found


def failover(place: StepSetup) -> Found:
    """See ``streams.failover``, which needs more packages than what comes before it."""
    from bench.gpu_slot import streams

    return streams.failover(place)


def speedup(place: StepSetup) -> Found:
    """The inflated 8B pair beside plain decoding, one stream, draft apart: the headline.

    Its 17 GiB of weights are written to disk first.
    """
    return _bench(place, "gpu-8b", 1, "--only", "decode", "--batch", "1", "--prompts", "4")


def assisted(place: StepSetup) -> Found:
    """The same pair beside transformers, assisted and plain: speeds, and differing tokens."""
    only = ["--only", "systems", "--systems", "transformers", "--batch", "1", "--prompts", "1", "--peer-tokens", "5"]
    return _bench(place, "gpu-8b", 2, *only)


def loaded(place: StepSetup) -> Found:
    """The same pair with several streams at once."""
    return _bench(place, "gpu-8b", 1, "--only", "decode", "--batch", "2" if place.dry else "8,32", "--prompts", "1")


def together(place: StepSetup) -> Found:
    """The same pair with the draft in the target's process, one stream, to compare with `speedup`."""
    return _bench(place, "gpu-8b", 1, "--only", "decode", "--batch", "1", "--prompts", "2", "--placement", "together")


def large(place: StepSetup) -> Found:
    """An inflated pair whose target has 32 B parameters, one stream; 62 GiB are written to disk first."""
    return _bench(place, "gpu-32b", 1, "--only", "decode", "--batch", "1", "--prompts", "1")


def _bench(place: StepSetup, pair: str, num_copies: int, *arguments: str) -> Found:
    """The report of ``bench``, and the predictions for its pair, of which the GPU holds ``num_copies`` at once.

    Raises ``MemoryError`` before anything is made where they do not fit.
    """
    if not place.dry:
        _check_fits(pair, num_copies, torch.cuda.get_device_properties(place.device).total_memory)
    where = ["--pair", "shipped", "--device", "cpu"] if place.dry else ["--pair", pair, "--device", "cuda"]
    sizes = ["--repeats", "1", "--max-tokens", "16" if place.dry else "256", "--temperature", "0,1"]
    with tempfile.TemporaryDirectory() as folder:
        found = _told("bench", *where, *sizes, *arguments, "--no-check", "--results", folder)
        (results,) = Path(folder).glob("*.json")
        found["results"] = json.loads(results.read_text())
    decoded = found["results"].get("decode")
    if decoded and not place.dry:
        from bench.gpu_slot.predicted import predicted_speed_ups

        target, draft = _shapes(pair)
        found["predicted"] = predicted_speed_ups(torch.cuda.get_device_name(place.device), target, draft, decoded)
    return found


def _shapes(pair: str) -> tuple[Shape, Shape]:
    from bench.pairs import DRAFTS, PAIRS, TARGETS

    target, draft = PAIRS[pair]
    return TARGETS[target], DRAFTS[draft]


def _check_fits(pair: str, num_copies: int, memory_bytes: int) -> None:
    from bench.checkpoints import inflated_bytes
    from specdec.commands.up.plan import shipped_model

    shapes = zip(("target", "draft"), _shapes(pair), strict=True)
    weights = sum(inflated_bytes(Path(shipped_model(role)), shape) for role, shape in shapes) * num_copies
    if weights + _BESIDE_BYTES > memory_bytes:
        needed, there = (weights + _BESIDE_BYTES) / 2**30, memory_bytes / 2**30
        raise MemoryError(f"{pair} needs {needed:.0f} GiB of a GPU, and this one has {there:.0f}")


def _told(module: str, *arguments: str) -> Found:
    """The output of a command, which is also printed line by line, so that a step that times out has shown it.

    Raises RuntimeError where the command fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}")
    return {"output": "\n".join(lines)[-_MOST_KEPT:].splitlines()}
