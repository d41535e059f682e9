"""Time of one engine step for 1, 8 and 16 rows, against the time to read the weights once.

The floor of a step is the bytes of its weights, as they are stored, over the memory bandwidth. The bandwidth on CPU is
that of reading a large array with the threads of the target's engine. On GPUs it is that of a large copy, read and
written bytes counted. The shapes on CPU are the pair's models, and on GPUs Llama shapes with random weights. All
measurements take turns, and a ratio is of one turn, because the load of a shared machine varies.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.deployment import pinned
from bench.pairs import Pair
from bench.plan import BenchPlan
from bench.shaped import SHAPES, engine_of, random_settings, time_steps
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.summary import spread
from specdec.commands.measuring.tables import Table
from specdec.commands.up.cores import assign_cores
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings

CONTEXT = 256
_TURNS = 5
_ROWS = {"one_row": (1, 0), "eight_rows": (1, 7), "sixteen_rows": (1, 15), "eight_sequences": (8, 0)}
"""Sequences of a step, and nodes that each verifies."""
_LARGE_BYTES = 1 << 29


def run(names: Sequence[str], plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure 1 row, 8 and 16 rows of one sequence, and 8 sequences for each shape.

    `names`: `target` and `draft` of the pair, or names of `SHAPES`; empty: the pair on CPU, all of `SHAPES` on GPUs.
    """
    progress.part("steps")
    names = names or (["target", "draft"] if plan.device == "cpu" else list(SHAPES))
    with pinned(plan.cores):
        rows = []
        for name in names:
            progress.tell(name)
            rows.append(measure(name, plan))
    columns = {
        "floor_ms": "floor ms",
        "one_row_ms": "1 row",
        "eight_rows_ms": "8 rows of one sequence",
        "sixteen_rows_ms": "16",
        "eight_sequences_ms": "8 sequences",
        "one_row_over_floor": "1 row / floor",
        "eight_rows_over_one": "8 / 1",
        "sixteen_rows_over_one": "16 / 1",
        "num_threads": "threads",
    }
    title = f"Step times on {plan.device}, context {CONTEXT}, ms, {plan.label}"
    table = Table(title, ["shape", *columns.values()])
    for row in rows:
        table.add(row["shape"], *(row[key] for key in columns))
    table.notes.append(
        "Floor: one read of the weights at the memory bandwidth. Medians of turns; ratios with quartiles."
    )
    report.add("steps", rows, [table])


def measure(name: str, plan: BenchPlan) -> dict[str, object]:
    """Median times of one shape in milliseconds, and ratios."""
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(name, plan, Path(folder))
        runner = ModelRunner.load(settings)
        weight_bytes = _stored_bytes(Path(settings.model)) or runner.num_parameters * runner.dtype.itemsize
    runner.warmup()
    engine = engine_of(runner)
    turns = []
    for _ in range(_TURNS):
        bandwidth = memory_bandwidth(plan)
        times_ms = {rows: time_steps(engine, [CONTEXT] * seqs, nodes)[0] for rows, (seqs, nodes) in _ROWS.items()}
        turns.append({"bandwidth": bandwidth, "floor": weight_bytes / bandwidth * 1e3, **times_ms})

    def median(key: str) -> float:
        return statistics.median(turn[key] for turn in turns)

    def ratio(key: str, of: str) -> dict[str, float]:
        return spread([turn[key] / turn[of] for turn in turns])

    return {
        "shape": name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "num_parameters": runner.num_parameters,
        "weight_bytes": weight_bytes,
        "bandwidth_bytes_per_s": median("bandwidth"),
        "numerics_id": runner.numerics_id,
        "num_threads": settings.num_threads,
        "floor_ms": median("floor"),
        **{f"{rows}_ms": median(rows) for rows in _ROWS},
        "one_row_over_floor": ratio("one_row", "floor"),
        "eight_rows_over_one": ratio("eight_rows", "one_row"),
        "sixteen_rows_over_one": ratio("sixteen_rows", "one_row"),
    }


def memory_bandwidth(plan: BenchPlan) -> float:
    """Bytes per second of a large read on CPU, and of a large copy (read and written) on GPUs."""
    device = plan.device
    source = torch.ones(_LARGE_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source) if device != "cpu" else None
    num_threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(len(assign_cores(plan.cores).target_engine))
    times = []
    for _ in range(10):
        _synchronize(device)
        started_s = time.perf_counter()
        if target is None:
            source.sum()
        else:
            target.copy_(source)
        _synchronize(device)
        times.append(time.perf_counter() - started_s)
    torch.set_num_threads(num_threads)
    return source.nbytes * (1 if target is None else 2) / statistics.median(times)


def _stored_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's weights; 0 where there are none."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _settings(name: str, plan: BenchPlan, folder: Path) -> EngineSettings:
    device = plan.device
    options: dict[str, object] = {"device": "cuda:0" if device == "cuda" else device, "max_model_len": 1024}
    if device == "cpu":
        cores = assign_cores(plan.cores)
        options["num_threads"] = len(cores.draft_engine if name == "draft" else cores.target_engine)
    if name in ("target", "draft"):
        return EngineSettings(model=str(_model(plan.pair, name)), **options)  # type: ignore[arg-type]
    dtype = "bfloat16" if device != "cpu" else "float32"
    return random_settings(SHAPES[name], folder, dtype=dtype, num_blocks=1024, **options)


def _model(pair: Pair, role: str) -> Path:
    return pair.target.folder if role == "target" else pair.draft.folder


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
