"""Engines of models with random weights, by their sizes, and the times of their steps. Services are not imported.

    python -m bench.shaped --shapes llama-8b --contexts 1024 32768+31x500 --rows 1 8 --results FOLDER

times steps of one sequence that verifies rows, or of several after unequal contexts, and the prompts before them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.engine.batch import Batch
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.model.beside import PassRows
from specdec.engine.model.runner import ModelRunner
from specdec.engine.scheduler import Scheduler
from specdec.engine.settings import EngineSettings
from specdec.engine.tree import TokenTree

SHAPES: dict[str, dict[str, int]] = {
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
TINY = "tiny"
SIZES = {TINY: {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}, **SHAPES}  # fmt: skip
_WARMUP, _REPEATS = 3, 12
_LEVELS = 8


def random_settings(sizes: Mapping[str, int], folder: Path, **settings: Any) -> EngineSettings:
    """Settings of a Llama model of these sizes with random weights; its config is written to the folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": settings["max_model_len"],
        "tie_word_embeddings": sizes == SHAPES["llama-1b"],
        "torch_dtype": "bfloat16",
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return EngineSettings(model=str(folder), load_format="dummy", **{"self_test": False, **settings})


def random_runner(shape: str, *, more: Mapping[str, Any] | None = None, **settings: Any) -> ModelRunner:
    """A warm model with random weights: a shape by its name, with ``more`` of its config."""
    with tempfile.TemporaryDirectory() as folder:
        runner = ModelRunner.load(random_settings({**SIZES[shape], **(more or {})}, Path(folder), **settings))
    runner.warmup()
    return runner


def engine_of(runner: ModelRunner) -> Engine:
    """An engine over a runner's whole cache."""
    pool = BlockPool(runner.num_blocks, runner.block_size)
    limits = runner.settings.rows_of_step(runner.device.type), runner.settings.max_batch_seqs, runner.max_model_len
    return Engine(runner, pool, Scheduler(pool, *limits, runner.session_states()))


def time_steps(engine: Engine, contexts: Sequence[int], num_nodes: int = 0) -> tuple[float, float]:
    """Median milliseconds of a step over sequences after these numbers of tokens, which verify `num_nodes` nodes each;
    and milliseconds of computing these tokens before."""
    device = str(engine.runner.device)
    began_s = _now_s(device)
    sequences = [
        engine.add([(7 * s + i) % 500 for i in range(context)], num_prompt_tokens=context)
        for s, context in enumerate(contexts)
    ]
    while any(seq.num_pending_tokens for seq in sequences):
        if engine.step() is None:
            raise MemoryError(f"the KV cache has no room for contexts of {max(contexts)} tokens")
    prefill_s = _now_s(device) - began_s
    times = []
    for repeat in range(_WARMUP + _REPEATS):
        for seq in sequences:
            engine.append(seq, [repeat])
            seq.tree = TokenTree(range(num_nodes)) if num_nodes else None
        started_s = _now_s(device)
        engine.step()
        times.append(_now_s(device) - started_s)
    for seq in sequences:
        engine.distrust(seq)  # the next prompt is computed again
        engine.free(seq)
    return statistics.median(times[_WARMUP:]) * 1e3, prefill_s * 1e3


def _now_s(device: str) -> float:
    """Seconds on a clock, once a GPU has done what was launched."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def rows_of(runner: ModelRunner, first: int, num_rows: int, *, is_tree: bool = False) -> tuple[Batch, list[int]]:
    """Tokens of one sequence from a position on, in the first blocks of the cache, and the indices of their rows.

    As a tree the sequence goes on with the first node of each level, of at most `_LEVELS`, so that captured steps have
    room for its paths.
    """
    rows, end = PassRows(runner.block_size), first + num_rows
    rows.add_sequence(range(-(-end // runner.block_size)))

    def token(position: int) -> int:
        return position * 7919 % runner.vocab_size

    for position in range(first, first + 1 if is_tree else end):
        rows.add(token(position), position)
    if not is_tree:
        return rows.batch(runner.device), list(range(num_rows))
    width = max(2, -(-(num_rows - 1) // _LEVELS))
    for node in range(num_rows - 1):
        level, beside = divmod(node, width)
        path = [first + 1 + above * width for above in range(level)] + [first + 1 + node]
        rows.add_apart((token(first + 1 + level) + beside) % runner.vocab_size, first + 1, path)
    return rows.batch(runner.device), [0, *range(1, num_rows, width)]


def _contexts(text: str) -> list[int]:
    """Numbers of tokens from a text such as 32768+31x500."""
    counts = [part.rpartition("x")[::2] for part in text.split("+")]
    return [int(tokens) for times, tokens in counts for _ in range(int(times or 1))]


def main() -> None:
    """Time steps on `cuda:0`, fast and deterministic, and write the figures after each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SIZES), required=True)
    parser.add_argument("--contexts", nargs="+", default=["1024"], help="tokens of a step's sequences: 32768+31x500")
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="rows of each sequence in a step")
    parser.add_argument("--deterministic", nargs="*", choices=list(SIZES), default=[], help="shapes, timed so as well")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--results", type=Path, required=True, help="folder of shaped.json")
    options = parser.parse_args()
    found: dict[str, float] = {}
    contexts = {text: _contexts(text) for text in options.contexts}
    for shape, is_ordered in [*((each, False) for each in options.shapes), *((e, True) for e in options.deterministic)]:
        most, longest = max(map(sum, contexts.values())), max(map(max, contexts.values()))
        settings: dict[str, Any] = {
            "max_model_len": longest + 512,
            "num_blocks": most // 16 + 256,
            "deterministic": is_ordered,
        }
        runner = random_runner(shape, device="cuda:0", dtype=options.dtype, **settings)
        name, engine = f"{shape.removeprefix('llama-')}{' deterministic' * is_ordered}", engine_of(runner)
        for (text, counts), rows in itertools.product(contexts.items(), options.rows):
            step_ms, found[f"{name}: prompt of {text}, ms"] = time_steps(engine, counts, rows - 1)
            found[f"{name}: {rows} rows at {text}, ms"] = step_ms
        print(json.dumps(found), flush=True)
        (options.results / "shaped.json").write_text(json.dumps(found))
        del runner, engine


if __name__ == "__main__":
    with torch.inference_mode():
        main()
