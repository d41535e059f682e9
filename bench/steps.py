"""Time of one engine step for 1 and 8 rows, against the time to read the weights once.

The floor of a step is weight bytes over memory bandwidth; the bandwidth is that of a large copy on the same device,
read and written bytes counted. Shapes with random weights stand in for models that cannot be downloaded: times do not
depend on values.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from specdec.cli.local.cores import assign_cores
from specdec.cli.local.plan import shipped_model
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
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
CONTEXT = 256
_WARMUP, _REPEATS = 5, 30


def default_shapes(device: str) -> list[str]:
    """The shipped pair on CPU, Llama shapes on GPUs."""
    return ["shipped-target", "shipped-draft"] if device == "cpu" else list(SHAPES)


def run(names: list[str], device: str, console: Console) -> list[dict[str, object]]:
    """Measure 1 row, 8 rows of one sequence and 8 sequences for each shape; prints a table."""
    bandwidth = copy_bandwidth(device)
    rows = []
    table = Table(title=f"step times on {device}, context {CONTEXT}; copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    for column in ("shape", "floor ms", "1 row", "8 rows of one sequence", "8 sequences", "1 row / floor"):
        table.add_column(column, justify="right")
    for name in names:
        with console.status(f"{name}: loading"):
            row = measure(name, device, bandwidth)
        rows.append(row)
        keys = ("floor_ms", "one_row_ms", "eight_rows_ms", "eight_sequences_ms", "one_row_over_floor")
        table.add_row(name, *(f"{row[key]:.2f}" for key in keys))
    console.print(table)
    return rows


def measure(name: str, device: str, bandwidth: float) -> dict[str, object]:
    """Medians of one shape, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(name, device, Path(folder))
        runner = ModelRunner.load(settings)
    runner.warmup()
    weight_bytes = runner.num_parameters * runner.dtype.itemsize
    pool = BlockPool(runner.num_blocks, runner.block_size)
    engine = Engine(
        runner,
        pool,
        Scheduler(pool, settings.max_batch_tokens, settings.max_batch_seqs, runner.max_model_len),
    )
    one_row, eight_rows = _time_steps(engine, 1, 0), _time_steps(engine, 1, 7)
    eight_sequences = _time_steps(engine, 8, 0)
    floor_ms = weight_bytes / bandwidth * 1e3
    return {
        "shape": name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "num_parameters": runner.num_parameters,
        "weight_bytes": weight_bytes,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "numerics_id": runner.numerics_id,
        "num_threads": settings.num_threads,
        "floor_ms": floor_ms,
        "one_row_ms": one_row,
        "eight_rows_ms": eight_rows,
        "eight_sequences_ms": eight_sequences,
        "one_row_over_floor": one_row / floor_ms,
    }


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read plus written, of a large copy on the device."""
    source = torch.empty((1 << 30) if device != "cpu" else (1 << 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        _synchronize(device)
        started_s = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        times.append(time.perf_counter() - started_s)
    return 2 * source.numel() / statistics.median(times)


def _settings(name: str, device: str, folder: Path) -> EngineSettings:
    options: dict[str, object] = {"device": "cuda:0" if device == "cuda" else device, "max_model_len": 1024}
    if device == "cpu":
        cores = assign_cores(sorted(os.sched_getaffinity(0)))
        options["num_threads"] = len(cores.draft_engine if name.endswith("draft") else cores.target_engine)
    if name.startswith("shipped-"):
        return EngineSettings(model=shipped_model(name.removeprefix("shipped-")), **options)  # type: ignore[arg-type]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": name == "llama-1b",
        "torch_dtype": "bfloat16",
        **SHAPES[name],
    }
    (folder / "config.json").write_text(json.dumps(config))
    dtype = "bfloat16" if device != "cpu" else "float32"
    return EngineSettings(
        model=str(folder),
        load_format="dummy",
        dtype=dtype,  # type: ignore[arg-type]
        num_blocks=1024,
        self_test=False,
        **options,  # type: ignore[arg-type]
    )


def _time_steps(engine: Engine, num_sequences: int, num_nodes: int) -> float:
    device = str(engine.runner.device)
    sequences = [
        engine.add([(7 * s + i) % 1000 for i in range(CONTEXT)], num_prompt_tokens=CONTEXT)
        for s in range(num_sequences)
    ]
    while any(seq.num_pending_tokens for seq in sequences):
        engine.step()
    times = []
    for repeat in range(_WARMUP + _REPEATS):
        for seq in sequences:
            engine.append(seq, [repeat])
            seq.tree = TokenTree(range(num_nodes)) if num_nodes else None
        _synchronize(device)
        started_s = time.perf_counter()
        engine.step()
        _synchronize(device)
        times.append(time.perf_counter() - started_s)
    for seq in sequences:
        engine.free(seq)
    return statistics.median(times[_WARMUP:]) * 1e3


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
