"""Processor time of a greedy token of a mixture of experts: this engine's and transformers', one thread, in turns.

    python -m bench.mixture    # a qwen3_moe of 60 M parameters with random weights, float32

Processor time of the process, so that other work on the machine costs little; the median of a turn's steps, and the
ratio of each turn with its quartiles.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from specdec.commands.measuring.summary import spread
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.model.runner import ModelRunner
from specdec.engine.scheduler import Scheduler
from specdec.engine.settings import EngineSettings

CONTEXT, _STEPS, _TURNS = 256, 24, 7
_VOCAB = 8192


def main() -> None:
    """Print a line per turn and the ratio."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=_VOCAB, hidden_size=512, moe_intermediate_size=256, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, num_experts=16, num_experts_per_tok=4, decoder_sparse_step=1,
        norm_topk_prob=True, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        settings = EngineSettings(model=folder, device="cpu", dtype="float32", max_model_len=1024, num_threads=1)
        runner = ModelRunner.load(settings)
    runner.warmup()
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = Engine(
        runner,
        pool,
        Scheduler(pool, settings.rows_of_step(runner.device.type), settings.max_batch_seqs, runner.max_model_len),
    )
    print(f"{runner.num_parameters / 1e6:.3g} M parameters, {runner.numerics_id}")
    ratios = []
    for _ in range(_TURNS):
        reference_ms, ours_ms = transformers_ms(theirs), engine_ms(engine)
        ratios.append(reference_ms / ours_ms)
        print(f"transformers {reference_ms:.2f} ms a token, specdec {ours_ms:.2f}")
    found = spread(ratios)
    print(f"transformers / specdec: {found['median']:.3g} ({found['q1']:.3g} to {found['q3']:.3g})")


def transformers_ms(model: Any) -> float:
    """Processor time of a step of `generate` with its cache, in milliseconds."""
    times = []
    with torch.inference_mode():
        output = model(torch.arange(CONTEXT)[None] % _VOCAB, use_cache=True)
        for _ in range(_STEPS):
            token = output.logits[:, -1:].argmax(-1)
            began_s = time.process_time()
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            times.append(time.process_time() - began_s)
    return statistics.median(times) * 1e3


def engine_ms(engine: Engine) -> float:
    """Processor time of an engine step that decodes one token, in milliseconds."""
    sequence = engine.add([index % _VOCAB for index in range(CONTEXT)], num_prompt_tokens=CONTEXT)
    while sequence.num_pending_tokens:
        engine.step()
    times = []
    for step in range(_STEPS):
        engine.append(sequence, [step])
        began_s = time.process_time()
        engine.step()
        times.append(time.process_time() - began_s)
    engine.free(sequence)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
